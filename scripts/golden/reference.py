"""A float64 forward pass in numpy, written from the equations: an independent check of the golden logits.

One token at a time, with the recurrent state, convolution window and KV cache as plain arrays, so that a sequence can
be cut, continued and rolled back at any token. Weights are a dict of canonical names (no prefix) to float64 arrays.
"""

import copy

import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Reference:
    def __init__(self, config, weights):
        self.c = config
        self.w = weights
        self.hybrid = config["model_type"].startswith("qwen3_5")
        heads = config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // heads
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta", config.get("rope_theta"))
        rotary = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        self.inverse_frequencies = theta ** (-np.arange(0, rotary, 2) / rotary)
        self.rotary = rotary
        self.layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]

    def new_state(self):
        return [{} for _ in self.layer_types]

    def norm(self, x, name):
        scale = self.w[name] + (1.0 if self.hybrid else 0.0)
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.c["rms_norm_eps"]) * scale

    def rotate(self, x, position):
        """x: [heads, head_dim]; pairs (i, i + rotary/2) of the first `rotary` dims."""
        angle = position * self.inverse_frequencies
        half = self.rotary // 2
        a, b = x[:, :half], x[:, half : self.rotary]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[:, self.rotary :]], 1)

    def attention(self, x, p, state, position):
        c, w, d = self.c, self.w, self.head_dim
        nq, nkv = c["num_attention_heads"], c["num_key_value_heads"]
        bias = lambda name: w.get(f"{p}.{name}.bias", 0.0)
        q = w[f"{p}.q_proj.weight"] @ x + bias("q_proj")
        gate = None
        if self.hybrid:
            q = q.reshape(nq, 2 * d)
            q, gate = q[:, :d], q[:, d:]
        q = q.reshape(nq, d)
        k = (w[f"{p}.k_proj.weight"] @ x + bias("k_proj")).reshape(nkv, d)
        v = (w[f"{p}.v_proj.weight"] @ x + bias("v_proj")).reshape(nkv, d)
        if f"{p}.q_norm.weight" in w:
            q, k = self.norm(q, f"{p}.q_norm.weight"), self.norm(k, f"{p}.k_norm.weight")
        q, k = self.rotate(q, position), self.rotate(k, position)
        state.setdefault("k", []).append(k)
        state.setdefault("v", []).append(v)
        keys, values = np.stack(state["k"]), np.stack(state["v"])  # [T, nkv, d]
        out = np.empty((nq, d))
        for h in range(nq):
            scores = keys[:, h // (nq // nkv)] @ q[h] / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            out[h] = weights @ values[:, h // (nq // nkv)] / weights.sum()
        if gate is not None:
            out = out * sigmoid(gate)
        return w[f"{p}.o_proj.weight"] @ out.reshape(-1)

    def delta_net(self, x, p, state):
        c, w = self.c, self.w
        hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        u = w[f"{p}.in_proj_qkv.weight"] @ x
        z = (w[f"{p}.in_proj_z.weight"] @ x).reshape(hv, dv)
        beta = sigmoid(w[f"{p}.in_proj_b.weight"] @ x)
        decay = np.exp(-np.exp(w[f"{p}.A_log"]) * np.logaddexp(0.0, w[f"{p}.in_proj_a.weight"] @ x + w[f"{p}.dt_bias"]))
        taps = w[f"{p}.conv1d.weight"][:, 0, :]
        if "window" not in state:
            state["window"] = np.zeros((taps.shape[1] - 1, u.size))
            state["S"] = np.zeros((hv, dk, dv))
        window = np.concatenate([state["window"], u[None]])
        state["window"] = window[1:]
        conv = silu(np.einsum("tc,ct->c", window, taps))
        q, k, v = conv[: hk * dk].reshape(hk, dk), conv[hk * dk : 2 * hk * dk].reshape(hk, dk), conv[2 * hk * dk :].reshape(hv, dv)
        unit = lambda m: m / np.sqrt(np.sum(m * m, -1, keepdims=True) + 1e-6)
        q, k = unit(q) / np.sqrt(dk), unit(k)
        out = np.empty((hv, dv))
        S = state["S"] = state["S"].copy()
        for j in range(hv):
            i = j // (hv // hk)
            S[j] *= decay[j]
            S[j] += np.outer(k[i], beta[j] * (v[j] - S[j].T @ k[i]))
            out[j] = S[j].T @ q[i]
        out = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + c["rms_norm_eps"]) * w[f"{p}.norm.weight"] * silu(z)
        return w[f"{p}.out_proj.weight"] @ out.reshape(-1)

    def mlp(self, x, p):
        w = self.w
        return w[f"{p}.down_proj.weight"] @ (silu(w[f"{p}.gate_proj.weight"] @ x) * (w[f"{p}.up_proj.weight"] @ x))

    def step(self, token, state, position):
        """The logits, the residual stream after the embedding and each layer, and the hidden state after the norm."""
        x = self.w["embed_tokens.weight"][token]
        residual = [x]
        for i, kind in enumerate(self.layer_types):
            p = f"layers.{i}"
            normed = self.norm(x, f"{p}.input_layernorm.weight")
            if kind == "linear_attention":
                x = x + self.delta_net(normed, f"{p}.linear_attn", state[i])
            else:
                x = x + self.attention(normed, f"{p}.self_attn", state[i], position)
            x = x + self.mlp(self.norm(x, f"{p}.post_attention_layernorm.weight"), f"{p}.mlp")
            residual.append(x)
        hidden = self.norm(x, "norm.weight")
        return self.head(hidden), np.stack(residual), hidden

    def head(self, hidden):
        return self.w["embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"] @ hidden

    def mtp_step(self, hidden, token, state, position):
        """One row of the multi-token-prediction head: its logits and its own hidden state."""
        e = self.norm(self.w["embed_tokens.weight"][token], "mtp.pre_fc_norm_embedding.weight")
        m = self.norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        x = self.w["mtp.fc.weight"] @ np.concatenate([e, m])
        p = "mtp.layers.0"
        x = x + self.attention(self.norm(x, f"{p}.input_layernorm.weight"), f"{p}.self_attn", state, position)
        x = x + self.mlp(self.norm(x, f"{p}.post_attention_layernorm.weight"), f"{p}.mlp")
        hidden = self.norm(x, "mtp.norm.weight")
        return self.head(hidden), hidden

    def run(self, tokens, state=None, position=0):
        """Rows for `tokens` after the state's own tokens: logits [T, V], hidden [T, H], last residual, state."""
        state = copy.deepcopy(state) if state is not None else self.new_state()
        logits, hidden, residual = [], [], None
        for offset, token in enumerate(tokens):
            row, residual, h = self.step(token, state, position + offset)
            logits.append(row)
            hidden.append(h)
        return np.stack(logits), np.stack(hidden), residual, state
