/* Lower bound of a native policy in plain C: a network 4-64-64-2 with tanh, a Categorical, and its log-probability.
 *
 * The sizes are constants, so that the compiler can unroll loops. Weights are stored by input: w[i * OUT + j] leads from
 * input i to output j. Nothing is checked: not even NaN, for which torch raises an error. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { IN = 4, HIDDEN = 64, OUT = 2 };

struct actor {
    const float *w1, *b1, *w2, *b2, *w3, *b3;
    uint64_t state; /* of the random numbers */
};

static inline void dense(const float *w, const float *b, const float *x, int in, int out, float *y) {
    float sum[HIDDEN];
    memcpy(sum, b, sizeof(float) * (size_t)out);
    for (int i = 0; i < in; i++)
        for (int j = 0; j < out; j++) sum[j] += w[i * out + j] * x[i];
    memcpy(y, sum, sizeof(float) * (size_t)out);
}

static inline void tanh_all(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = tanhf(x[i]);
}

/* splitmix64, a uniform number in [0, 1) */
static inline float uniform(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return (float)((z ^ (z >> 31)) >> 40) * 0x1p-24f;
}

/* Computes rows 0 to n - 1 of the columns, one after the other. */
void act(struct actor *self, const float *obs, int64_t *action, float *logits, float *score, long n) {
    for (long t = 0; t < n; t++) {
        float a[HIDDEN], b[HIDDEN], *out = logits + t * OUT;
        dense(self->w1, self->b1, obs + t * IN, IN, HIDDEN, a);
        tanh_all(a, HIDDEN);
        dense(self->w2, self->b2, a, HIDDEN, HIDDEN, b);
        tanh_all(b, HIDDEN);
        dense(self->w3, self->b3, b, HIDDEN, OUT, out);
        float most = out[0] > out[1] ? out[0] : out[1];
        float p0 = expf(out[0] - most), total = p0 + expf(out[1] - most);
        int chosen = uniform(&self->state) * total >= p0;
        action[t] = chosen;
        score[t] = out[chosen] - most - logf(total);
    }
}
