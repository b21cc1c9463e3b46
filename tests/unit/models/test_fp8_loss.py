"""The loss whose backward products are in 8 bits: emulated, and with its kernel where Triton's interpreter runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.config.model import HFConfig, LlamaConfig
from plait.errors import ModelError
from plait.kernels.cross_entropy import PROB_SCALE as SCALE
from plait.kernels.cross_entropy import write_fp8_probs
from plait.kernels.fp8 import E5M2
from plait.kernels.triton import interprets
from plait.models import build_model, preset
from plait.models.common.losses import WAITING, Fp8Head, linear_cross_entropy
from plait.models.fused import use_fp8_head
from plait.plan.timing import body_of

DIM, WORDS, TOKENS = 48, 203, 333
EMULATED = Fp8Head(emulated=True)
LOOSE = 8 if interprets() else 1
"""The interpreter rounds to 8 bits otherwise than a device, and now and then to half of a number."""


def inputs(kind: str = "unsure", words: int = WORDS) -> list[Tensor]:
    """Hidden states of a model that is `unsure`, `right`, or `wrong`: of the words that it thinks of, one is right."""
    weight = torch.randn(words, DIM)
    labels = torch.randint(words, (TOKENS,))
    thought = {"unsure": labels[:, None], "right": labels[:, None], "wrong": torch.randint(words, (TOKENS, 3))}[kind]
    hidden = torch.randn(TOKENS, DIM) * 0.1 + (0.0 if kind == "unsure" else 0.1) * weight[thought].sum(1)
    labels = labels.masked_fill(torch.rand(TOKENS) < 0.2, -100)
    return [hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), labels]


def gradients(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int = 64, **how: Any) -> tuple[Tensor, ...]:
    term = linear_cross_entropy(hidden, weight, labels, chunk_bytes=rows * len(weight) * 2, **how)
    return torch.autograd.grad(term.sum / 13, (hidden, weight))


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(("kind", "bound"), [("unsure", 0.01), ("right", 0.02), ("wrong", 0.05)])
def test_gradients_are_near_those_of_float64(kind: str, bound: float) -> None:
    hidden, weight, labels = inputs(kind)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    total = F.cross_entropy(exact[0] @ exact[1].t(), labels, ignore_index=-100, reduction="sum")
    found = gradients(hidden, weight, labels, fp8=EMULATED)
    for ours, reference in zip(found, torch.autograd.grad(total / 13, exact), strict=True):
        assert ours.dtype == torch.bfloat16
        assert apart(ours, reference) < LOOSE * bound
    assert not found[0][labels == -100].any()
    assert any(not torch.equal(a, b) for a, b in zip(found, gradients(hidden, weight, labels), strict=True))


def test_the_loss_is_that_of_16_bits_with_and_without_gradients() -> None:
    hidden, weight, labels = inputs()
    wide, small = (linear_cross_entropy(hidden, weight, labels, chunk_bytes=2**14, fp8=how) for how in (None, EMULATED))
    torch.testing.assert_close(small, wide, rtol=1e-5, atol=0)
    with torch.no_grad():
        term = linear_cross_entropy(hidden, weight, labels, fp8=EMULATED)
    assert not term.sum.requires_grad
    torch.testing.assert_close(term, wide, rtol=1e-5, atol=0)


@pytest.mark.parametrize("words", [WORDS, 16, 256])
def test_the_size_of_chunks_does_not_matter(words: int) -> None:
    given = inputs(words=words)
    whole = gradients(*given, rows=TOKENS, fp8=EMULATED)
    for rows in (1, 40, 128):  # of 16 rows, so many chunks that some of them wait in vain for others
        for ours, expected in zip(gradients(*given, rows=rows, fp8=EMULATED), whole, strict=True):
            assert apart(ours, expected) < LOOSE * 0.03  # rounding: 0.012 at most; 16 tokens lost: 0.2
    assert TOKENS > 16 * WAITING
    assert TOKENS % (16 * WAITING)


class Largest(TorchDispatchMode):
    """How many numbers the largest result has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), 0)
        return out


@pytest.mark.skipif(interprets(), reason="the interpreter copies what a kernel is given, byte by byte")
def test_what_waits_does_not_grow_with_the_tokens() -> None:
    body = body_of(torch.ops.plait.fp8_linear_cross_entropy.default)
    assert body is not None
    hidden, weight, labels = (t.detach() for t in inputs())
    for times in (1, 3):
        with Largest() as seen:
            body(hidden.repeat(times, 1), weight, labels.repeat(times), 64, torch.bfloat16, True, True, True)
        assert seen.numel == 64 * WAITING * WORDS


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient_and_does_not_disturb_the_other(frozen: int) -> None:
    *both, labels = inputs()
    expected = gradients(*both, labels, fp8=EMULATED)[1 - frozen]
    both[frozen] = both[frozen].detach()
    term = linear_cross_entropy(both[0], both[1], labels, chunk_bytes=64 * WORDS * 2, fp8=EMULATED)
    (found,) = torch.autograd.grad(term.sum / 13, both[1 - frozen])
    assert torch.equal(found, expected)


def test_labels_that_count_for_nothing_give_no_gradient() -> None:
    hidden, weight, labels = inputs()
    assert not any(grad.any() for grad in gradients(hidden, weight, labels.fill_(-100), fp8=EMULATED))


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy's words, in the interpreter
def test_what_is_not_finite_stays_visible() -> None:
    hidden, weight, labels = inputs()
    hidden.data[7, 3], labels[7] = torch.inf, 5
    assert all(grad.isnan().any() for grad in gradients(hidden, weight, labels, fp8=EMULATED))


def test_it_is_a_well_behaved_operator() -> None:
    hidden, weight, labels = inputs()
    operator = torch.ops.plait.fp8_linear_cross_entropy.default
    for needed in ((True, True), (False, False)):
        torch.library.opcheck(operator, (hidden, weight, labels, 128, torch.bfloat16, True, *needed))
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    terms = [make(hidden, weight, labels, fp8=EMULATED).sum for make in (compiled, linear_cross_entropy)]
    grads = [torch.autograd.grad(term, (hidden, weight)) for term in terms]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(("tokens", "words"), [(130, 70), (16, 64), (5, 17)])
def test_probabilities_of_other_words_lie_both_ways(tokens: int, words: int) -> None:
    numbers = 2.0 ** torch.randint(-29, -1, (tokens, words)) * (1 + torch.randint(4, (tokens, words)) / 4)
    log_totals = torch.randn(tokens)
    logits = (numbers * 1.03).log() + log_totals[:, None]  # the nearest number is the next smaller one
    labels = torch.randint(-1, words, (tokens,))
    wanted = numbers.scatter(1, labels.clamp(min=0)[:, None], 0.0) * (labels >= 0)[:, None]
    wide, high = words + -words % 16, tokens + -tokens % 16
    rows = torch.ones(tokens, wide).to(E5M2)
    columns = torch.ones(words, 16 + high).to(E5M2)  # those of another chunk come first
    write_fp8_probs(logits, labels, log_totals, rows, columns[:, 16:])
    assert torch.equal(rows.float() / SCALE, F.pad(wanted, (0, wide - words)))
    assert torch.equal(columns[:, 16:].float() / SCALE, F.pad(wanted.t(), (0, high - tokens)))
    assert (columns[:, :16].float() == 1.0).all()
    one, other = torch.empty_like(rows), torch.empty_like(columns[:, 16:])
    write_fp8_probs(logits, labels, log_totals, one, None)
    write_fp8_probs(logits, labels, log_totals, None, other)
    assert torch.equal(one.float(), rows.float())
    assert torch.equal(other.float(), columns[:, 16:].float())


def trained_gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, tokens).sum.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("family", ["tied", "own", "hf"])
def test_a_model_whose_head_is_told_so_has_nearly_the_same_gradients(family: str) -> None:
    if family == "hf":
        pytest.importorskip("transformers")
        model = build_model(preset("hf", "tiny-llama")).bfloat16()
    else:
        size: dict[str, Any] = {"vocab_size": 61, "dim": 32, "layers": 1, "heads": 4}
        model = build_model(LlamaConfig(**size, tie_embeddings=family == "tied")).bfloat16()
    tokens = torch.randint(61, (3, 20))
    wide = trained_gradients(model, tokens)
    use_fp8_head(model, emulated=True)
    small = trained_gradients(model, tokens)
    assert list(small) == list(wide)
    assert any(not torch.equal(small[name], grad) for name, grad in wide.items())
    for name, grad in wide.items():
        assert apart(small[name], grad) < LOOSE * 0.1, name  # the worst of 500 models: 0.05


def test_models_whose_head_cannot_are_refused() -> None:
    for model, named in (
        (nn.Linear(16, 16), ["Linear"]),
        (build_model(LlamaConfig(vocab_size=61, dim=24, layers=1, heads=4)), ["Llama", "24", "16"]),
    ):
        with refused(ModelError, "precision.fp8.head", *named):
            use_fp8_head(model, emulated=True)


def test_decoders_that_make_logits_are_refused() -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gemma2", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    with refused(ModelError, "precision.fp8.head", "Gemma2ForCausalLM", "logits"):
        use_fp8_head(build_model(HFConfig(config=config)), emulated=True)
    with refused(ModelError, "precision.fp8.head", "LlamaForCausalLM", "strategy.compile.scope"):
        use_fp8_head(build_model(preset("hf", "tiny-llama")), emulated=True, traced=True)
