"""Models of transformers as sequences of calls: stages of them, in one process, do what the whole model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hf_models import batch, model_types, tiny_config, tiny_model
from tests.refusals import refused
from torch import Tensor, nn

from plait.config import HFConfig
from plait.distributed.materialize import find_initializer, give_storage, initialize
from plait.distributed.pipeline_calls import see_calls
from plait.distributed.pipeline_parallel import Pipeline
from plait.distributed.pipeline_split import make_stages, outline_of, plan_stages
from plait.errors import ConfigError, ModelError
from plait.models.hf import build_hf_model

FEW = {
    "causal-lm": ["opt", "gemma2", "mamba2", "zamba2", "deepseek_v4", "gemma4_text"],
    "masked-lm": ["bert", "modernbert", "albert"],
    "seq2seq-lm": ["bart"],
    "image-classification": ["vit"],
}
"""What every run tests; `--fresh` tests all architectures of these families."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        every = metafunc.config.option.fresh
        names = [(kind, name) for kind, few in FEW.items() for name in (model_types(kind) if every else few)]
        metafunc.parametrize("architecture", names, ids=["-".join(name) for name in names])


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def test_stages_have_the_gradients_of_the_model(architecture: tuple[str, str], group: dist.ProcessGroup) -> None:
    kind, name = architecture
    try:
        model = tiny_model(name, kind)
        inputs = batch(model, kind, seed=1)
        model.train()(**inputs).loss.backward()
    except Exception as error:
        pytest.skip(f"one process does not train it: {error}")
    try:
        check_stages(lambda: tiny_model(name, kind), inputs, group)
    except (ModelError, ConfigError) as error:
        if name in FEW[kind]:
            raise
        pytest.skip(str(error))


def check_stages(make: Callable[[], Any], inputs: Any, group: dist.ProcessGroup) -> None:
    """Two stages have the loss, the parameters and the gradients of the model."""
    model, divided = make().train(), make().train()
    torch.manual_seed(2)  # some routers draw noise
    expected = model(**inputs).loss
    expected.backward()
    plan = plan_stages(divided, ranks=1, schedule="interleaved_1f1b", example=inputs)
    pipeline = Pipeline(make_stages(plan, 0), schedule="interleaved_1f1b", group=group, device=torch.device("cpu"))
    losses: list[float] = []

    def note(answer: Any, _inputs: Any, _index: int) -> Tensor:
        loss: Tensor = answer.loss
        losses.append(float(loss.detach()))
        return loss

    torch.manual_seed(2)
    pipeline.step([inputs], note)
    pipeline.tied.sum()
    assert losses == pytest.approx([float(expected.detach())], rel=1e-5)
    stages = pipeline.stages
    owned = {key: param for stage in stages for key, param in stage.module.named_parameters() if stage.owns(key)}
    assert owned.keys() == {key for key, _ in model.named_parameters()}
    for key, param in model.named_parameters():
        if param.grad is not None:
            found = owned[key].grad
            assert found is not None, key
            torch.testing.assert_close(
                found, param.grad, rtol=1e-3, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}"
            )


def test_keys_and_values_that_layers_share_are_sent(group: dist.ProcessGroup) -> None:
    def make() -> Any:
        config = tiny_config("gemma3n_text")
        config.num_hidden_layers, config.num_kv_shared_layers = 4, 2
        config.layer_types = ["full_attention"] * 4
        return type(tiny_model("gemma3n_text", "causal-lm"))(
            type(config)(**{**config.to_dict(), "intermediate_size": 48, "activation_sparsity_pattern": None})
        )

    model = make()
    check_stages(seeded(make), batch(model, "causal-lm", seed=1), group)
    order = see_calls(model)
    assert len(order.crossing(order.layers[2])) > len(order.crossing(order.layers[0]))


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def again() -> Any:
        torch.manual_seed(3)
        return make()

    return again


def llama(layers: int = 4) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.AutoConfig.for_model("llama", vocab_size=16, num_hidden_layers=layers, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_only_the_hidden_states_cross_a_cut_of_a_decoder() -> None:
    with torch.device("meta"):
        model = llama()
    order = see_calls(model)
    assert [order.calls[index].module for index in order.layers] == [f"model.layers.{index}" for index in range(4)]
    for index in order.layers[:-1]:
        assert order.crossing(index) == ((index, 0),)
    assert all(param.is_meta for param in model.parameters())


def test_a_stage_that_holds_only_the_tied_weight_of_an_embedding_is_initialized() -> None:
    config = tiny_config("gemma2").to_dict() | {"tie_word_embeddings": True}
    with torch.device("meta"):
        model = build_hf_model(HFConfig(type="hf", config=config))
    initializer = find_initializer(model)
    assert initializer is not None
    last = make_stages(plan_stages(model, ranks=2, schedule="1f1b"), 1)[0]
    assert "model.embed_tokens.weight" in last.tied
    give_storage(last.module, torch.device("cpu"))
    initialize(last.module, initializer, seed=7, device=torch.device("cpu"))
    assert all(param.isfinite().all() for param in last.module.parameters())


def test_the_layers_of_both_halves_of_an_encoder_decoder_are_stages() -> None:
    outline = outline_of(tiny_model("bart", "seq2seq-lm"))
    assert [name.rpartition(".")[0] for name in outline.layers] == [
        *["model.encoder.layers"] * 2,
        *["model.decoder.layers"] * 2,
    ]


class Drops(nn.Module):
    """Draws a mask for all layers outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.config = llama(1).config
        self.base_model_prefix = ""

    def get_input_embeddings(self) -> nn.Module:
        return self.layers[0]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids[:, :4].float()
        mask = torch.rand_like(x)
        for layer in self.layers:
            x = layer(x * mask)
        return x


def test_random_numbers_that_several_stages_would_draw_are_refused() -> None:
    with refused(ModelError, "layers.0", "dropout"):
        plan_stages(Drops(), ranks=2, schedule="1f1b")


def test_an_input_that_calls_what_was_not_seen_is_refused() -> None:
    model = tiny_model("llava", "image-text")
    plan = plan_stages(model, ranks=1, schedule="interleaved_1f1b")
    first = make_stages(plan, 0)[0]
    ids = torch.full((1, 16), model.config.image_token_id)
    with refused(ModelError, "vision_tower", "example"):
        first.call(first.module, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}, None)
