"""Make a draft for a target, on one GPU in minutes: some of its layers, trained on text that the target writes.

    python -m tools.distill write    MODEL DATA.npy --tokens 25e6
    python -m tools.distill train    MODEL DATA.npy DRAFT.gguf --layers 16 --minutes 8
    python -m tools.distill evaluate MODEL DRAFT.gguf --prompts specbench.jsonl.xz

The draft keeps the first and the last layer, evenly spaced layers between, and the target's embedding and head. A
difference to each kept matrix and the norms are trained against the target's whole distribution. In the last part of
the training the forward uses quantised differences (the backward is straight-through), so that the stored draft is the
trained one. MODEL is a Hugging Face folder or a GGUF file.

Knows nothing of the engine; faser/models/draft.py reads the result.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from faser.errors import ConfigError
from faser.models.config import ModelConfig
from faser.models.draft import BLOCK, MATRICES, QUANT_TYPES, Patch, apply_patch, read_patch, ternary, write_patch
from faser.models.layers import rotate
from faser.models.transformer import Transformer
from faser.text.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
OPENINGS = (
    "", "", "", "", "", "", "", "", "What", "How", "Why", "Who", "When", "Which", "Can you", "Could you", "Is", "Are",
    "Write", "Write a", "Write a story about", "Write an email", "Write a poem", "Write a Python function", "Explain",
    "Give", "Give me", "List", "List five", "Describe", "Compare", "Summarize", "Summarize the following text:",
    "Summarize:", "Translate", "Translate German to English:", "Translate to French:", "Solve", "Solve the equation",
    "Find", "Calculate", "If", "Suppose", "Imagine", "Imagine you are", "Pretend you are", "You are", "I", "I am", "My",
    "The following", "Read the", "Based on the", "Answer the question", "Extract", "Classify", "Rewrite", "Edit",
    "Correct", "Improve", "Create", "Design", "Develop", "Implement", "Please", "Tell me", "Tell me about", "Help me",
    "Let's", "Provide", "Identify", "A", "In", "There are", "John", "Given", "Consider", "Define", "Analyze", "Discuss",
    "Draft", "Compose", "Generate", "Suggest", "Recommend", "Should", "Do", "Does", "Where", "Use", "Convert",
    "Evaluate",
)  # fmt: skip


# ── the target and its copy for training ─────────────────────────────────────────────────────────────────────────────


def load_target(path: str, dtype: torch.dtype, device: str) -> tuple[Transformer, Tokenizer]:
    """A model from a Hugging Face folder or a GGUF file, and its tokenizer."""
    from faser.models import gguf, weights

    model = load_model(path, dtype, device)
    if gguf.is_gguf(path):
        return model, gguf.load_tokenizer(path)
    return model, Tokenizer.from_folder(weights.resolve(path))


def load_model(path: str, dtype: torch.dtype, device: str) -> Transformer:
    from faser.models import gguf, weights

    if gguf.is_gguf(path):
        return gguf.load(path, gguf.read_config(path), dtype, device)
    folder = weights.resolve(path)
    return weights.load(folder, ModelConfig.from_folder(folder), dtype, device)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [sequences, heads, tokens, head_dim]; cos, sin [tokens, head_dim // 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def run_layer(
    config: ModelConfig,
    w: dict[str, Tensor | None],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """One decoder layer over whole sequences, differentiable. x [sequences, tokens, hidden].

    mask [tokens, tokens]: which token sees which; None: each sees itself and those before it.
    """
    count, length, _ = x.shape
    normed = F.rms_norm(x, x.shape[-1:], w["attention_norm"], config.norm_eps)
    qkv = F.linear(normed, w["qkv"], w.get("qkv_bias")).view(count, length, -1, config.head_dim).transpose(1, 2)
    query, key, value = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    if w.get("qk_norm") is not None:
        both = F.rms_norm(torch.cat((query, key), 1), (config.head_dim,), None, config.norm_eps)
        both = both * w["qk_norm"][:, None]  # type: ignore[index]
        query, key = both.split([config.num_heads, config.num_kv_heads], dim=1)
    query, key = rotary(query, cos, sin), rotary(key, cos, sin)
    if mask is not None:  # no fused kernel takes both a mask and fewer KV heads
        key, value = (each.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for each in (key, value))
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=mask is None
    )
    x = x + F.linear(attended.transpose(1, 2).reshape(count, length, -1), w["out"], w.get("out_bias"))
    normed = F.rms_norm(x, x.shape[-1:], w["mlp_norm"], config.norm_eps)
    gate, up = F.linear(normed, w["gate_up"]).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w["down"])


def layer_weights(model: Transformer, index: int) -> dict[str, Tensor | None]:
    return dict(vars(model.layers[index]))


def hidden_of(model: Transformer, tokens: Tensor) -> Tensor:
    """The target's normed output for whole sequences. tokens [sequences, tokens]."""
    return features_of(model, tokens, ())[1]


def features_of(model: Transformer, tokens: Tensor, feature_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The residual streams before some layers, side by side, and the normed output, for whole sequences.

    tokens [sequences, tokens] -> [sequences, tokens, features * hidden], [sequences, tokens, hidden]. The number of
    layers as a feature layer is the stream behind the last one.
    """
    x = model.embed(tokens)
    streams = {0: x} if 0 in feature_layers else {}
    cos, sin = model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]]
    for index in range(model.num_layers):
        x = run_layer(model.config, layer_weights(model, index), x, cos, sin)
        if index + 1 in feature_layers:
            streams[index + 1] = x
    features = torch.cat([streams[layer] for layer in feature_layers], dim=-1) if feature_layers else x[..., :0]
    return features, F.rms_norm(x, x.shape[-1:], model.final_norm, model.config.norm_eps)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """Generates many sequences at once with a KV cache of fixed size; on a GPU with one graph per `stretch` positions.

    Every sequence starts at position 0, follows its own prompt and then samples.
    """

    def __init__(self, model: Transformer, num_sequences: int, num_tokens: int, stretch: int = 128) -> None:
        config = model.config
        if num_tokens > model.max_positions:
            raise ConfigError(f"{num_tokens} tokens a sequence: the target has {model.max_positions} positions")
        self.model, self.stretch, self.num_tokens = model, stretch, num_tokens
        shape = (model.num_layers, 2, num_sequences, config.num_kv_heads, num_tokens, config.head_dim)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.tokens = torch.zeros(num_sequences, dtype=torch.int64, device=model.device)
        self.logits = torch.zeros(num_sequences, config.vocab_size, dtype=torch.float32, device=model.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def step(self, position: int) -> Tensor:
        """Logits after `self.tokens` at `position`. [sequences, vocabulary]"""
        self.position.fill_(position)
        seen = min(self.num_tokens, (position // self.stretch + 1) * self.stretch)
        if not self.tokens.is_cuda:
            self._forward(seen)
        else:
            if seen not in self._graphs:
                self._graphs[seen] = self._capture(seen)
            self._graphs[seen].replay()
        return self.logits

    def _capture(self, seen: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which still writes the position and the tokens
        with torch.cuda.stream(stream):
            self._forward(seen)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward(seen)
        return graph

    def _forward(self, seen: int) -> None:
        model, config = self.model, self.model.config
        cos, sin = model.cos[self.position].unsqueeze(1), model.sin[self.position].unsqueeze(1)
        mask = torch.where(torch.arange(seen, device=model.device) <= self.position, 0.0, -math.inf).to(model.dtype)
        mask = mask.expand(1, 1, config.num_heads // config.num_kv_heads, seen)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            rotate(qkv[:, : -config.num_kv_heads], cos, sin)
            query, key, value = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
            self.cache[layer, 0].index_copy_(2, self.position, key.unsqueeze(2))
            self.cache[layer, 1].index_copy_(2, self.position, value.unsqueeze(2))
            keys, values = self.cache[layer, :, :, :, :seen]
            query = query.reshape(query.shape[0], config.num_kv_heads, -1, config.head_dim)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).flatten(1)

        self.logits.copy_(model.logits(model.run_layers(model.embed(self.tokens), attend)))


Choose = Callable[[Tensor, int], Tensor]  # (logits [sequences, vocabulary], position of the new token) → tokens


def write_sequences(writer: Writer, prompts: Sequence[Sequence[int]], num_tokens: int, choose: Choose) -> Tensor:
    """[sequences, num_tokens]: each prompt with its continuation."""
    device, lengths = writer.tokens.device, [len(prompt) for prompt in prompts]
    led = torch.zeros(len(prompts), max(lengths), dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        led[row, : len(prompt)] = torch.tensor(prompt)
    length = torch.tensor(lengths, device=device)
    written = torch.zeros(len(prompts), num_tokens, dtype=torch.int64, device=device)
    written[:, 0] = led[:, 0]
    for position in range(num_tokens - 1):
        writer.tokens.copy_(written[:, position])
        logits = writer.step(position)
        if position + 1 >= min(lengths):
            written[:, position + 1] = choose(logits, position + 1)
        if position + 1 < led.shape[1]:
            written[:, position + 1] = torch.where(
                position + 1 < length, led[:, position + 1], written[:, position + 1]
            )
    return written


def sample_top_p(temperature: Tensor, top_p: float = 0.95, most: int = 64) -> Choose:
    """Top-p sampling among the best `most` tokens, which have nearly all of the probability at these temperatures."""

    def choose(logits: Tensor, position: int) -> Tensor:
        best, ids = logits.topk(min(most, logits.shape[-1]), dim=-1)
        p = (best / temperature).softmax(dim=-1)
        outside = p.cumsum(dim=-1) - p > top_p
        p = p.masked_fill(outside, 0.0)
        chosen = (p / torch.empty_like(p).exponential_()).argmax(dim=-1, keepdim=True)
        return ids.gather(1, chosen)[:, 0]

    return choose


def write_data(args: argparse.Namespace) -> None:
    device = pick_device(args.device)
    model, tokenizer = load_target(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    extra = read_questions(args.questions)
    writer = Writer(model, args.batch, args.length)
    batches, started, total = [], time.perf_counter(), 0
    with torch.inference_mode():
        while total < args.tokens:
            prompts = [
                tokenizer.encode(SYSTEM + "<|im_start|>user\n" + pick_opening(random, extra)) for _ in range(args.batch)
            ]
            temperature = 0.7 + 0.2 * torch.rand(args.batch, 1, device=device)
            batch = write_sequences(writer, prompts, args.length, sample_top_p(temperature))
            batches.append(
                batch.to(torch.int32).cpu().numpy().astype(np.uint16 if model.config.vocab_size <= 65536 else np.int32)
            )
            total += batch.numel()
            seconds = time.perf_counter() - started
            print(f"{total / 1e6:.1f} M tokens in {seconds:.0f} s ({total / seconds:,.0f} tokens/s)", flush=True)
    with open(args.data, "wb") as file:  # np.save would add a suffix to a name
        np.save(file, np.concatenate(batches))
    for row in batches[-1][:3]:
        print(repr(tokenizer.decode(row.tolist(), skip_special_tokens=False))[:700], flush=True)


def pick_opening(random: np.random.Generator, questions: Sequence[str]) -> str:
    """The beginning of a user's turn: a common opening, or, one time in five, a whole question of a file."""
    if questions and random.random() < 0.2:
        return questions[random.integers(len(questions))] + "<|im_end|>\n<|im_start|>assistant\n"
    return OPENINGS[random.integers(len(OPENINGS))]


def read_questions(path: str | None) -> list[str]:
    return [str(row["question"]) for row in read_jsonl(path)] if path else []


def read_jsonl(path: str) -> list[dict[str, object]]:
    raw = Path(path).read_bytes()
    # Split as bytes: str.splitlines would also split at separators that JSON allows within a string.
    return [json.loads(line) for line in (lzma.decompress(raw) if path.endswith(".xz") else raw).splitlines()]


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Student:
    """The draft in training: for each kept layer, a difference to each matrix, and norms of its own."""

    def __init__(self, target: Transformer, num_layers: int, vocabulary: Tensor | None) -> None:
        if not 2 <= num_layers <= target.num_layers:
            raise ConfigError(f"layers={num_layers}: expected 2 to {target.num_layers}")
        self.target, self.vocabulary = target, vocabulary
        self.source_layers = tuple(np.linspace(0, target.num_layers - 1, num_layers).round().astype(int).tolist())
        self.head = target.head if vocabulary is None else target.head[vocabulary.to(target.device)].contiguous()
        self.differences, self.norms = [], []
        for source in self.source_layers:
            tensors = {k: v for k, v in layer_weights(target, source).items() if v is not None}
            _require_blocks(tensors)
            self.differences.append({k: torch.zeros_like(tensors[k], dtype=torch.float32) for k in MATRICES})
            self.norms.append({k: v.float().clone() for k, v in tensors.items() if k not in MATRICES})
        self.final_norm = target.final_norm.float().clone()
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameters(self) -> list[Tensor]:
        return [*self.matrices(), *(t for norms in self.norms for t in norms.values()), self.final_norm]

    def matrices(self) -> list[Tensor]:
        return [tensor for difference in self.differences for tensor in difference.values()]

    def hidden(self, tokens: Tensor, quantised: bool) -> Tensor:
        """[sequences, tokens] → normed output [sequences, tokens, hidden]."""
        target, dtype = self.target, self.target.dtype
        x = target.embed(tokens)
        cos, sin = target.cos[: tokens.shape[1]], target.sin[: tokens.shape[1]]
        for source, difference, norms in zip(self.source_layers, self.differences, self.norms, strict=True):
            w: dict[str, Tensor | None] = {name: tensor.to(dtype) for name, tensor in norms.items()}
            for name, tensor in difference.items():
                stored = tensor + (ternary(tensor.detach()) - tensor.detach()) if quantised else tensor
                w[name] = getattr(target.layers[source], name) + stored.to(dtype)
            x = run_layer(target.config, w, x, cos, sin)
        return F.rms_norm(x, x.shape[-1:], self.final_norm.to(dtype), target.config.norm_eps)

    def patch(self, quantised: bool) -> Patch:
        keep = ternary if quantised else (lambda tensor: tensor)
        return Patch(
            self.source_layers,
            tuple({k: keep(v.detach()) for k, v in difference.items()} for difference in self.differences),
            tuple({k: v.detach() for k, v in norms.items()} for norms in self.norms),
            self.final_norm.detach(),
            self.vocabulary,
        )


def _require_blocks(tensors: Mapping[str, Tensor]) -> None:
    for name in MATRICES:
        if tensors[name].numel() % BLOCK:
            raise ConfigError(
                f"{name} is {list(tensors[name].shape)}: expected a multiple of {BLOCK} numbers to quantise"
            )


def distil_loss(student: Student, hidden: Tensor, right: Tensor, chunk: int = 16384) -> tuple[float, float]:
    """KL(target || draft), `chunk` rows at a time; leaves the gradient in `hidden.grad`.

    hidden, right [rows, hidden]: of the draft, of the target. With a short vocabulary the target's distribution is
    restricted to it, and a row's weight is the probability that remains. Returns the mean loss and the share of rows
    whose best tokens agree.
    """
    total, agree = torch.zeros((), device=hidden.device), torch.zeros((), device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        part = hidden[start : start + chunk]
        with torch.no_grad():
            whole = F.linear(right[start : start + chunk], student.target.head).float()
            best = whole.argmax(dim=-1)
            labels, mass = whole.log_softmax(dim=-1), torch.ones((), device=hidden.device)
            if student.vocabulary is not None:
                labels = labels[:, student.vocabulary]
                mass = labels.logsumexp(dim=-1, keepdim=True)
                labels, mass = labels - mass, mass.exp()
        guess = F.linear(part, student.head).float().log_softmax(dim=-1)
        loss = (labels.exp() * (labels - guess) * mass).sum() / hidden.shape[0]
        loss.backward()
        guessed = guess.detach().argmax(dim=-1)
        guessed = guessed if student.vocabulary is None else student.vocabulary[guessed]
        total += loss.detach()
        agree += (guessed == best).sum()
    return float(total), float(agree) / hidden.shape[0]


def batches(data: np.ndarray, size: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless shuffled passes over the data."""
    if len(data) < size:
        raise ConfigError(f"a batch of {size}: the data have {len(data)} sequences; write more or lower --batch")
    while True:
        order = random.permutation(len(data))
        for start in range(0, len(data) - size + 1, size):
            yield data[np.sort(order[start : start + size])].astype(np.int64)


def train(args: argparse.Namespace) -> None:
    device = pick_device(args.device)
    target, _ = load_target(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    data = np.load(args.data, mmap_mode="r")
    vocabulary = None
    if args.vocabulary:
        vocabulary = frequent_tokens(count_tokens(data, target.config.vocab_size), args.vocabulary).to(device)
    student = Student(target, args.layers, vocabulary)
    fit(student, data, args, share_of_minutes(args.minutes))
    quantised = args.quant == "TQ2_0"
    with torch.no_grad():
        patch = student.patch(quantised)
    note = (
        f"{args.layers} layers, {data.size} tokens, {args.minutes} minutes, {args.quant}, "
        f"vocabulary {args.vocabulary or 'whole'}"
    )
    write_patch(args.draft, patch, target.config, args.quant, note)
    print(f"{args.draft}: {Path(args.draft).stat().st_size / 1e6:.1f} MB, {note}", flush=True)


def count_tokens(data: np.ndarray, num_tokens: int) -> np.ndarray:
    """How often each token occurs in the first 65,536 sequences."""
    return np.bincount(np.asarray(data[: 1 << 16]).reshape(-1), minlength=num_tokens)


def frequent_tokens(counts: np.ndarray, size: int) -> Tensor:
    """The `size` most frequent tokens in ascending order; prints which share of the text they are."""
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    print(f"{size} tokens hold {counts[chosen].sum() / counts.sum():.4f} of the text", flush=True)
    return torch.from_numpy(chosen)


ShareDone = Callable[[int], float]  # number of steps → share of the training that is done; it ends at 1


def share_of_minutes(minutes: float, spent: float = 0.0) -> ShareDone:
    """The share of the minutes that have passed since this call, with `spent` seconds before it."""
    started = time.perf_counter() - spent
    return lambda step: (time.perf_counter() - started) / (60 * minutes)


def fit(student: Student, data: np.ndarray, args: argparse.Namespace, share_done: ShareDone) -> list[float]:
    """Train until `share_done` is 1; it sets the learning rate and when to quantise. Returns the loss of each step."""
    device = student.target.device
    optimiser = torch.optim.AdamW(
        student.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    feed = batches(data, args.batch, np.random.default_rng(args.seed))
    started = time.perf_counter()
    losses: list[float] = []
    agreed: list[float] = []
    while (done := share_done(len(losses))) < 1:
        optimiser.param_groups[0]["lr"] = args.rate * rate_share(len(losses), done)
        tokens = torch.from_numpy(next(feed)).to(device)
        quantised = args.quant == "TQ2_0" and done > args.full_share
        loss, agreement = backward(student, tokens, quantised)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss)
        agreed.append(agreement)
        if len(losses) % args.every == 0:
            seconds, num_tokens = time.perf_counter() - started, len(losses) * tokens.numel()
            print(
                f"step {len(losses):5} {seconds:5.0f} s {num_tokens / 1e6:6.1f} M tokens "
                f"({num_tokens / seconds:,.0f}/s) loss {np.mean(losses[-args.every :]):.4f} "
                f"agreement {np.mean(agreed[-args.every :]):.4f}{' ternary' if quantised else ''}",
                flush=True,
            )
    return losses


def rate_share(step: int, done: float) -> float:
    """Factor of the learning rate: linear warm-up over 100 steps, times a cosine from 1 to 0.02 over the training."""
    return min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def backward(student: Student, tokens: Tensor, quantised: bool) -> tuple[float, float]:
    """Add the gradient of one batch to the student's; returns loss and agreement. tokens [sequences, tokens]."""
    with torch.no_grad():
        right = hidden_of(student.target, tokens).flatten(0, 1)
    out = student.hidden(tokens, quantised).flatten(0, 1)
    leaf = out.detach().requires_grad_(True)
    loss, agreement = distil_loss(student, leaf, right)
    out.backward(leaf.grad)
    return loss, agreement


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate(args: argparse.Namespace) -> None:
    """Agreement and tokens per target step on prompts outside the training, by category, greedy and sampled."""
    device = pick_device(args.device)
    target, tokenizer = load_target(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    drafts = {path: apply_patch(target, read_patch(path, target.config)) for path in args.drafts}
    rows = read_jsonl(args.prompts)[:: args.stride]
    prompts = [tokenizer.encode(chat_prompt(str(row["turns"][0])))[: args.most_prompt] for row in rows]  # type: ignore[index]
    categories = [str(row["category"]) for row in rows]
    report: dict[str, object] = {}
    for temperature in (0.0, 1.0):
        texts = write_answers(target, prompts, args.output, temperature)
        for path, draft in drafts.items():
            agreed = [
                agreements(draft, text, len(prompt), temperature, seed)
                for seed, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
            ]
            table = tabulate(agreed, categories)
            report[f"{Path(path).name} at temperature {temperature:g}"] = table
            print(f"\n{Path(path).name}, temperature {temperature:g}")
            print(
                f"{'category':20}{'requests':>9}{'agreement':>11}" + "".join(f"{f'length {k}':>10}" for k in (2, 4, 6))
            )
            for name, line in table.items():
                print(
                    f"{name:20}{line['requests']:9}{line['agreement']:11.3f}"
                    + "".join(f"{line[f'tokens_{k}']:10.3f}" for k in (2, 4, 6)),
                    flush=True,
                )
    print(json.dumps(report))


def chat_prompt(question: str) -> str:
    return f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@torch.inference_mode()
def write_answers(
    target: Transformer, prompts: Sequence[Sequence[int]], num_output: int, temperature: float
) -> list[Tensor]:
    """The target's output for each prompt, cut after the first end token."""
    num_tokens = max(map(len, prompts)) + num_output
    writer = Writer(target, len(prompts), num_tokens, stretch=256)
    seeds = torch.arange(len(prompts), device=target.device)

    def choose(logits: Tensor, position: int) -> Tensor:
        if temperature == 0:
            return logits.argmax(dim=-1)
        noise = gumbel(seeds, torch.full_like(seeds, position), logits.shape[1])
        return (logits / temperature + noise).argmax(dim=-1)

    written = write_sequences(writer, prompts, num_tokens, choose)
    ends = torch.tensor(target.config.eos_token_ids, device=target.device)
    texts = []
    for row, prompt in enumerate(prompts):
        text = written[row, : len(prompt) + num_output]
        stops = torch.isin(text[len(prompt) :], ends).nonzero()
        texts.append(text if not len(stops) else text[: len(prompt) + int(stops[0]) + 1])
    return texts


def gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """The sampler's noise (faser/runtime/sampling.py), computed on the device. [N], [N] → [N, num_tokens]"""
    from faser.runtime import sampling

    keys = sampling.noise_keys(seeds.cpu().numpy().astype(np.uint64), positions.cpu().numpy())
    key0, key1 = (torch.from_numpy(key.astype(np.int64)).to(seeds.device)[:, None] for key in keys)

    def mix(x: Tensor) -> Tensor:
        for shift, factor in zip(sampling.SHIFTS, (*sampling.MULTIPLIERS, 1), strict=True):
            x = ((x ^ (x >> int(shift))) * int(factor)) & 0xFFFF_FFFF
        return x

    steps = torch.arange(num_tokens, device=seeds.device) * int(sampling.WEYL)
    hashed = mix(mix((steps + key0) & 0xFFFF_FFFF) ^ key1)
    uniform = ((hashed.float() + 0.5) * 2**-32).clamp(max=float(sampling.LARGEST_UNIFORM))
    return -(-torch.log1p(-uniform)).log()


@torch.inference_mode()
def agreements(draft: Transformer, text: Tensor, num_prompt: int, temperature: float, seed: int) -> np.ndarray:
    """[outputs]: whether the draft proposes each output token, given the target's tokens before it."""
    hidden = hidden_of(draft, text[None, :-1])[0, num_prompt - 1 :]
    logits = F.linear(hidden, draft.head).float()
    if temperature:
        positions = torch.arange(num_prompt, len(text), device=text.device)
        noise = gumbel(torch.full_like(positions, seed), positions, draft.config.vocab_size)
        logits = logits / temperature + (noise if draft.vocabulary is None else noise[:, draft.vocabulary])
    guess = logits.argmax(dim=-1)
    guess = guess if draft.vocabulary is None else draft.vocabulary.to(guess.device)[guess]
    return (guess == text[num_prompt:]).cpu().numpy()


def tabulate(agreed: Sequence[np.ndarray], categories: Sequence[str]) -> dict[str, dict[str, float]]:
    table = {}
    for name in [*dict.fromkeys(categories), "all"]:
        chosen = [a for a, category in zip(agreed, categories, strict=True) if name in (category, "all")]
        line = {"requests": len(chosen), "agreement": float(np.concatenate(chosen).mean())}
        for length in (2, 4, 6):
            steps = [num_steps(a, length) for a in chosen]
            line[f"tokens_{length}"] = sum(map(len, chosen)) / sum(steps)
        table[name] = line
    return table


def num_steps(agreed: np.ndarray, length: int) -> int:
    """Target steps for one text if every step drafts `length` tokens: a step emits the accepted tokens + 1."""
    steps = position = 0
    while position < len(agreed):
        run = agreed[position : position + length]
        position += (len(run) if run.all() else int(np.argmin(run))) + 1
        steps += 1
    return steps


# ── command line ─────────────────────────────────────────────────────────────────────────────────────────────────────


def pick_device(name: str) -> str:
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary)
        added.set_defaults(run=run)
        added.add_argument("model", help="Hugging Face folder or GGUF file of the target")
        added.add_argument("--device", default="auto")
        added.add_argument("--seed", type=int, default=0)
        return added

    write = command("write", write_data, "let the target write text to train on")
    write.add_argument("data")
    write.add_argument("--tokens", type=float, default=25e6)
    write.add_argument("--batch", type=int, default=2048, help="sequences written at once")
    write.add_argument("--length", type=int, default=512, help="tokens of a sequence, prompt included")
    write.add_argument("--questions", help="JSONL with a `question` each, used for a fifth of the user turns")
    fit_ = command("train", train, "train a draft on that text")
    fit_.add_argument("data")
    fit_.add_argument("draft")
    fit_.add_argument("--layers", type=int, default=16)
    fit_.add_argument("--vocabulary", type=int, default=0, help="tokens the draft may propose; 0 is all")
    fit_.add_argument("--minutes", type=float, default=8)
    fit_.add_argument("--batch", type=int, default=64, help="sequences a step")
    fit_.add_argument("--rate", type=float, default=4e-4)
    fit_.add_argument("--quant", default="TQ2_0", choices=QUANT_TYPES)
    fit_.add_argument(
        "--full-share", type=float, default=0.7, help="share of the time before differences are quantised"
    )
    fit_.add_argument("--every", type=int, default=100, help="steps between reports")
    judge = command("evaluate", evaluate, "agreement and tokens per step by category")
    judge.add_argument("drafts", nargs="+")
    judge.add_argument("--prompts", required=True, help="JSONL with `turns` and `category`")
    judge.add_argument("--output", type=int, default=128)
    judge.add_argument("--most-prompt", type=int, default=1024)
    judge.add_argument("--stride", type=int, default=1, help="use every n-th prompt")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
