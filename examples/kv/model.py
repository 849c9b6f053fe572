"""A small transformer with random weights, on numpy or on a GPU: the same tokens in, the same bits out.

SPDX-License-Identifier: MIT OR Apache-2.0
"""
import numpy

LAYERS, HEADS, DIM, VOCABULARY = 4, 8, 32, 512


class NumpyModel:
    """Keys and values are numpy arrays (heads, tokens, dim)."""

    device = "numpy"

    def __init__(self):
        rng = numpy.random.default_rng(7)
        width = HEADS * DIM

        def weights(*shape):
            return rng.standard_normal(shape, dtype=numpy.float32) / numpy.float32(shape[0] ** 0.5)

        self.embedding = weights(VOCABULARY, width)
        self.layers = [tuple(weights(width, width) for _ in range(4)) for _ in range(LAYERS)]

    def shape(self, blocks, tokens, heads=HEADS):
        """Of the cache of one layer: keys and values, blocks, tokens, heads, dim."""
        return (2, blocks, tokens, heads, DIM)

    def empty(self, shape):
        return numpy.zeros(shape, dtype=numpy.float32)

    def forward(self, tokens, past):
        """(logits of the last token, keys and values of all tokens by layer); past is the same of the tokens before."""
        hidden, present = self.embedding[tokens], []
        for layer, (query, key, value, out) in enumerate(self.layers):
            split = [(hidden @ w).reshape(len(tokens), HEADS, DIM).transpose(1, 0, 2) for w in (query, key, value)]
            keys, values = split[1:] if past is None else (numpy.concatenate([p, n], 1) for p, n in zip(past[layer], split[1:]))
            scores = split[0] @ keys.transpose(0, 2, 1) / numpy.float32(DIM ** 0.5)
            behind = numpy.arange(keys.shape[1])[None] > numpy.arange(keys.shape[1] - len(tokens), keys.shape[1])[:, None]
            scores = numpy.where(behind[None], numpy.float32(-1e9), scores)
            shares = numpy.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            mixed = (shares @ values).transpose(1, 0, 2).reshape(len(tokens), -1)
            hidden = hidden + numpy.tanh(mixed @ out)
            present.append((keys, values))
        return hidden[-1] @ self.embedding.T, present

    def best(self, logits):
        return int(logits.argmax())

    def bits(self, logits):
        return logits.tobytes().hex()

    def concatenate(self, parts):
        return numpy.concatenate(parts, axis=3)

    def stream(self):
        """What a transfer must wait for."""
        return None

    def to_host(self, array):
        return array.tobytes()

    def from_host(self, array, data):
        array[...] = numpy.frombuffer(data, dtype=array.dtype).reshape(array.shape)

    def put(self, cache, blocks, keys, values):
        """Stores keys and values (heads, tokens, dim) of a prompt into blocks of one layer's cache."""
        tokens = cache.shape[2]
        for at, block in enumerate(blocks):
            for which, array in enumerate((keys, values)):
                part = array[:, at * tokens:(at + 1) * tokens].swapaxes(0, 1)
                cache[which, block, :len(part)] = part

    def get(self, cache, blocks, count):
        """The first `count` tokens of these blocks, as keys and values."""
        found = cache[:, blocks].reshape(2, -1, *cache.shape[3:])[:, :count].swapaxes(1, 2)
        return tuple(self.packed(one) for one in found)

    def packed(self, array):
        return numpy.ascontiguousarray(array)


class TorchModel(NumpyModel):
    """Llama of the transformers package on a GPU; keys and values are tensors."""

    device = "cuda"

    def __init__(self, layers=8, heads=8, dim=64):
        import torch
        import transformers
        self.torch, self.transformers = torch, transformers
        self.heads, self.dim = heads, dim
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True, warn_only=True)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=heads * dim, intermediate_size=4 * heads * dim, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, max_position_embeddings=8192)
        config._attn_implementation = "eager"
        self.model = transformers.LlamaForCausalLM(config).to("cuda", torch.float16).eval()

    def shape(self, blocks, tokens, heads=None):
        return (2, blocks, tokens, heads or self.heads, self.dim)

    def empty(self, shape):
        return self.torch.zeros(shape, dtype=self.torch.float16, device="cuda")

    def forward(self, tokens, past):
        cache = self.transformers.DynamicCache()
        for layer, (keys, values) in enumerate(past or ()):
            cache.update(keys[None], values[None], layer)
        with self.torch.inference_mode():
            done = self.model(self.torch.tensor([list(tokens)], device="cuda"), past_key_values=cache, use_cache=True)
        found = done.past_key_values
        pairs = [(one.keys, one.values) for one in found.layers] if hasattr(found, "layers") else zip(found.key_cache, found.value_cache)
        return done.logits[0, -1], [(keys[0], values[0]) for keys, values in pairs]

    def bits(self, logits):
        return logits.cpu().numpy().tobytes().hex()

    def concatenate(self, parts):
        return self.torch.cat(parts, dim=3)

    def stream(self):
        return self.torch.cuda.current_stream()

    def to_host(self, array):
        return array.cpu().numpy().tobytes()

    def from_host(self, array, data):
        array.copy_(self.torch.frombuffer(bytearray(data), dtype=array.dtype).reshape(array.shape))
        self.torch.cuda.synchronize()

    def packed(self, array):
        return array.contiguous()


def chosen(name):
    return TorchModel() if name == "cuda" else NumpyModel()
