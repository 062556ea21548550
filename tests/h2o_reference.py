"""The oracle of H2O: a Llama in f64 numpy, one token at a time, that forgets in the words of the paper.

It shares nothing with the engine: no pages, no places, no chunks, no log-sum-exp. Every layer and KV head has a
dictionary of what it keeps.
"""

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass
class Kept:
    key: np.ndarray
    value: np.ndarray
    mass: float = 0.0


class H2OReference:
    def __init__(self, model):
        self.config = model.config
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)

    def run(self, prompt, tokens, h2o):
        """Feeds the prompt and then `tokens`.

        Returns:
            log-probabilities after the prompt's last token and after each of `tokens`, [1 + len(tokens), V];
            after each token of both, the positions kept by each layer and KV head, before the prompt is compacted.
        """
        c = self.config
        layers = [[{} for _ in range(c.num_kv_heads)] for _ in range(c.num_layers)]
        scores, kept = [], []
        for t, token in enumerate([*prompt, *tokens]):
            for head in (head for layer in layers for head in layer):
                if t == len(prompt):
                    self.forget_most(head, t, h2o)
                if t >= len(prompt) and len(head) == h2o.budget:
                    self.forget_one(head, t, h2o)
            logits = self.feed(layers, token, t)
            kept.append([[sorted(head) for head in layer] for layer in layers])
            if t >= len(prompt) - 1:
                scores.append(logits - np.logaddexp.reduce(logits))
        return np.array(scores), kept

    def forget_most(self, head, count, h2o):
        older = sorted(range(max(0, count - h2o.recent)), key=lambda p: (-head[p].mass, p))
        for position in older[h2o.heavy :] if count > h2o.budget else ():
            del head[position]

    def forget_one(self, head, t, h2o):
        del head[min((p for p in head if p <= t - h2o.recent), key=lambda p: (head[p].mass, p))]

    def feed(self, layers, token, t):
        c, p = self.config, self.params
        x = p["embed"]["weight"][token]
        for i, heads in enumerate(layers):
            w = p[f"layers_{i}"]
            y = self.norm(x, w["attention_norm"])
            q, k, v = ((w["attention"][name]["weight"] @ y).reshape(-1, c.head_dim) for name in "qkv")
            q, k = self.rotate(q, t), self.rotate(k, t)
            out = []
            for j, head in enumerate(heads):
                head[t] = Kept(k[j], v[j])
                for query in q.reshape(len(heads), -1, c.head_dim)[j]:
                    logits = np.array([query @ one.key for one in head.values()]) / np.sqrt(c.head_dim)
                    weights = np.exp(logits - np.logaddexp.reduce(logits))
                    out.append(weights @ np.array([one.value for one in head.values()]))
                    for one, weight in zip(head.values(), weights):
                        one.mass += weight
            x = x + w["attention"]["o"]["weight"] @ np.concatenate(out)
            y = self.norm(x, w["mlp_norm"])
            gate, up = (w["mlp"][name]["weight"] @ y for name in ("gate", "up"))
            x = x + w["mlp"]["down"]["weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return p["embed"]["weight"] @ self.norm(x, p["final_norm"])

    def norm(self, x, weights):
        return x / np.sqrt(np.mean(x**2) + self.config.rms_norm_eps) * weights["scale"]

    def rotate(self, x, t):
        half = self.config.head_dim // 2
        angles = t * self.config.rope_theta ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], 1)
