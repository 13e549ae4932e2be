/* The limit of a sample in plain C: rows of k parallel arrays into k buffers made beforehand.
 *
 * gather_k copies rows idx[0..n) of every src[j] (row[j] bytes each) to dst[j]. The first cache line of the row needed
 * AHEAD draws later is prefetched, so that the misses of independent rows overlap. Indices are not checked. */
#include <stdint.h>
#include <string.h>

enum { AHEAD = 12 };

static inline void copy_row(char *d, const char *s, long bytes) {
    switch (bytes) { /* constant sizes become single moves */
        case 1: *d = *s; break;
        case 4: memcpy(d, s, 4); break;
        case 8: memcpy(d, s, 8); break;
        case 16: memcpy(d, s, 16); break;
        default: memcpy(d, s, (size_t)bytes);
    }
}

void gather_k(char **dst, char **src, const long *row, int k, const int64_t *idx, long n) {
    for (long i = 0; i < n; i++) {
        if (i + AHEAD < n)
            for (int j = 0; j < k; j++) __builtin_prefetch(src[j] + idx[i + AHEAD] * row[j]);
        for (int j = 0; j < k; j++) copy_row(dst[j] + i * row[j], src[j] + idx[i] * row[j], row[j]);
    }
}
