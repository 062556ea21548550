"""Slow, obvious float64 versions of every processor, one row at a time."""

import numpy as np


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def top_k(x, k):
    if k <= 0 or k >= len(x):
        return np.ones(len(x), bool)
    return x >= np.sort(x)[-k]


def top_p(x, p):
    """Keeps a token if the tokens strictly more probable have less than mass p."""
    if p >= 1:
        return np.ones(len(x), bool)
    probs = softmax(x)
    return np.array([probs[x > v].sum() < p for v in x])


def min_p(x, p):
    probs = softmax(x)
    return probs >= p * probs.max()


def typical_p(x, p):
    probs = softmax(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probs)
        entropy = np.nansum(probs * surprise)
    distance = np.abs(surprise - entropy)
    return np.array([probs[distance < d].sum() < p for d in distance]) & (probs > 0)


def penalize(x, counts, in_prompt, repetition, presence, frequency):
    x = x.astype(np.float64).copy()
    for i in range(len(x)):
        if counts[i] or in_prompt[i]:
            x[i] = x[i] * repetition if x[i] < 0 else x[i] / repetition
        if counts[i]:
            x[i] -= presence + frequency * counts[i]
    return x
