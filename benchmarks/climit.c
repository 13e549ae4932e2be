/* Lower bounds in plain C: copies of rows and runs of k parallel arrays into k preallocated buffers, and sum trees.
 *
 * The functions check nothing and take no lock. All results go into memory of the caller. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { AHEAD = 12, ARMS = 8 };

static inline void copy_row(char *d, const char *s, long bytes) {
    switch (bytes) { /* constant sizes become single moves */
        case 1: *d = *s; break;
        case 4: memcpy(d, s, 4); break;
        case 8: memcpy(d, s, 8); break;
        case 16: memcpy(d, s, 16); break;
        default: memcpy(d, s, (size_t)bytes);
    }
}

/* Copies rows idx[0..n) of every src[j] (row[j] bytes each) to dst[j]. The first cache line of the row needed AHEAD
 * draws later is prefetched, so that the misses of independent rows overlap. */
void gather_k(char **dst, char **src, const long *row, int k, const int64_t *idx, long n) {
    for (long i = 0; i < n; i++) {
        if (i + AHEAD < n)
            for (int j = 0; j < k; j++) __builtin_prefetch(src[j] + idx[i + AHEAD] * row[j]);
        for (int j = 0; j < k; j++) copy_row(dst[j] + i * row[j], src[j] + idx[i] * row[j], row[j]);
    }
}

/* Copies m runs of len consecutive rows of every src[j]. Run i begins at row start[i]. */
void gather_runs(char **dst, char **src, const long *row, int k, const int64_t *start, long m, long len) {
    for (long i = 0; i < m; i++)
        for (int j = 0; j < k; j++)
            memcpy(dst[j] + i * len * row[j], src[j] + start[i] * row[j], (size_t)(len * row[j]));
}

/* Converts priorities to leaves: (priority + eps) ** alpha. */
void powers(const double *priority, double eps, double alpha, double *out, long n) {
    for (long i = 0; i < n; i++) out[i] = pow(priority[i] + eps, alpha);
}

/* Computes importance weights of leaves, and divides them by the largest weight of the batch. */
void weights(const double *leaf, double scale, double beta, float *out, long n) {
    float most = 0;
    for (long i = 0; i < n; i++) {
        out[i] = powf((float)(leaf[i] * scale), (float)-beta);
        if (out[i] > most) most = out[i];
    }
    for (long i = 0; i < n; i++) out[i] /= most;
}

/* Sets n leaves of an 8-ary sum tree, whose nodes are one cache line of 8 doubles. Level l starts at t + at[l]. Level 0
 * is one node, and the last level holds the leaves. Each parent is recomputed from its children, so that rounding
 * errors do not accumulate. */
void oct_update(double *t, const long *at, int levels, const int64_t *idx, const double *leaf, long n) {
    for (long i = 0; i < n; i++) {
        if (i + 8 < n) __builtin_prefetch(t + at[levels - 1] + idx[i + 8]);
        long k = idx[i];
        t[at[levels - 1] + k] = leaf[i];
        for (int l = levels - 1; l > 0; l--) {
            const double *c = t + at[l] + (k & ~(long)(ARMS - 1));
            double s = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]));
            k /= ARMS;
            t[at[l - 1] + k] = s;
        }
    }
}

/* Draws n leaves in proportion to their values, by uniform numbers u in [0, 1). All draws descend one level before any
 * descends the next, so that the cache misses of a level overlap. rest[0..n) is scratch memory. */
void oct_draw(const double *t, const long *at, int levels, const double *u, int64_t *idx, double *leaf, long n,
              double *rest) {
    double total = 0;
    for (int j = 0; j < ARMS; j++) total += t[at[0] + j];
    total *= 1 - 1e-12; /* so that rounding errors of the descent cannot pass the last leaf */
    for (long i = 0; i < n; i++) {
        rest[i] = u[i] * total;
        idx[i] = 0;
    }
    for (int l = 0; l < levels; l++)
        for (long i = 0; i < n; i++) {
            if (i + 8 < n) __builtin_prefetch(t + at[l] + idx[i + 8] * ARMS);
            const double *c = t + at[l] + idx[i] * ARMS;
            double x = rest[i], s = 0, low = 0;
            int k = 0;
            for (int j = 0; j < ARMS - 1; j++) {
                s += c[j];
                int over = x >= s;
                k += over;
                low = over ? s : low;
            }
            rest[i] = x - low;
            idx[i] = idx[i] * ARMS + k;
            if (l == levels - 1) leaf[i] = c[k];
        }
}

/* Sets n leaves of a binary sum tree in one array. Node k has the children 2 k and 2 k + 1. The leaves are at
 * [cap, 2 cap). */
void bin_update(double *t, long cap, const int64_t *idx, const double *leaf, long n) {
    for (long i = 0; i < n; i++) {
        long k = idx[i] + cap;
        t[k] = leaf[i];
        for (k >>= 1; k; k >>= 1) t[k] = t[2 * k] + t[2 * k + 1];
    }
}

void bin_draw(const double *t, long cap, const double *u, int64_t *idx, double *leaf, long n, double *rest) {
    double total = t[1] * (1 - 1e-12);
    for (long i = 0; i < n; i++) {
        rest[i] = u[i] * total;
        idx[i] = 1;
    }
    for (long c = 1; c < cap; c <<= 1)
        for (long i = 0; i < n; i++) {
            long k = idx[i] * 2;
            double left = t[k];
            int right = rest[i] >= left;
            rest[i] -= right ? left : 0.0;
            idx[i] = k + right;
        }
    for (long i = 0; i < n; i++) {
        leaf[i] = t[idx[i]];
        idx[i] -= cap;
    }
}
