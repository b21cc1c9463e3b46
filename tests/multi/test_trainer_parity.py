"""A Hugging Face Trainer script with only the class changed: the Trainer's own losses, whatever the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.multi.ranks import RankPool

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5


def _texts(count: int) -> list[dict[str, Any]]:
    """Sequences of different lengths, so that ranks and micro-batches have different numbers of targets."""
    generator = torch.Generator().manual_seed(4)
    samples = []
    for _ in range(count):
        ids = torch.randint(5, 50, (12,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(1, 9, (), generator=generator))] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def _model(adapters: bool) -> Any:
    torch.manual_seed(8)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if adapters:
        import peft

        options = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, options)
    return model


class LooksAlone(transformers.TrainerCallback):  # type: ignore[misc]
    """The main process keeps the weights and asks the model, while the others go on."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            assert not any(isinstance(weight, DTensor) for weight in model.state_dict().values())
            with torch.no_grad():
                assert model.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=2).shape[1] <= 4


def train(
    kind: Any, folder: Path, *, adapters: bool = False, steps: int = 4, resume: Path | None = None, **options: Any
) -> dict[str, Any]:
    """What people write, with little in it that is not a default."""
    sections = options.pop("sections", None)
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=1, logging_steps=1, max_steps=steps,
        log_level="error",
        per_device_eval_batch_size=3, gradient_accumulation_steps=2, learning_rate=2e-2, warmup_steps=1,
        weight_decay=0.1, max_grad_norm=0.5, save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,  # the one before the last
        **{"per_device_train_batch_size": 2, **options},
    )  # fmt: skip
    extra = {} if sections is None else {"sections": sections}
    model = _model(adapters)
    data = _texts(28)
    trainer = kind(model, args, train_dataset=data, eval_dataset=data[:7], **extra)
    if sections in ({"strategy": "zero1"}, {"strategy": "zero2"}):
        trainer.add_callback(LooksAlone())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume / "checkpoint-2"))
    if sections == {"strategy": "zero3"}:
        assert all(isinstance(param, DTensor) for param in model.parameters()), "frozen or not, each rank has a part"
    history = trainer.state.log_history
    found = {
        key: [entry[key] for entry in history if key in entry]
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss")
    }
    found["predictions"] = trainer.predict(data[:7]).predictions.tolist()
    trainer.save_model(str(folder / "final"))
    return found


def _reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


_TENSOR = {"sections": {"strategy": {"layout": {"tp": 2}}}, "per_device_train_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"sections": {"strategy": "ddp"}},
    "zero1": {"sections": {"strategy": "zero1"}},
    "zero3": {"sections": {"strategy": "zero3"}, "gradient_checkpointing": True},
    "fsdp": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
    "bf16": {"sections": {"strategy": "zero3"}, "bf16": True},
    "tensor": _TENSOR,
    **{f"adapters {word}": {"sections": {"strategy": word}, "adapters": True} for word in ("ddp", "zero1", "zero2")},
    "adapters": {"sections": {"strategy": "zero3"}, "adapters": True},
    "adapters tensor": {**_TENSOR, "adapters": True},
}


def run_all(rank: int, size: int, folder: Path, adapters: bool) -> dict[str, Any]:
    from plait.frontends.transformers import PlaitTrainer

    _reset()
    found: dict[str, Any] = {"real": train(transformers.Trainer, folder / "real", adapters=adapters)}
    for case, options in CASES.items():
        if options.get("adapters", False) is adapters:
            _reset()
            found[case] = train(PlaitTrainer, folder / case, **options)
    _reset()
    # Goes on from the middle of a run that was spread otherwise.
    before = folder / ("adapters" if adapters else "zero3")
    found["resumed"] = train(PlaitTrainer, before, resume=before, adapters=adapters, sections={"strategy": "ddp"})
    for strategy in ("zero3", "zero1"):  # and from one that the Trainer itself wrote, with its optimizer and its best
        _reset()
        how: dict[str, Any] = {"resume": folder / "real", "adapters": adapters, "sections": {"strategy": strategy}}
        found[f"taken over {strategy}"] = train(PlaitTrainer, folder / f"taken {strategy}", **how)
    return found


@pytest.mark.parametrize("adapters", [False, True], ids=["whole model", "adapters"])
def test_trainer_keeps_its_losses_under_every_strategy(two_ranks: RankPool, tmp_path: Path, adapters: bool) -> None:
    if adapters:
        pytest.importorskip("peft")
    for found in two_ranks.run(run_all, tmp_path, adapters):
        expected = found.pop("real")
        resumed = found.pop("resumed")
        for case, story in found.items():
            tolerance = 5e-2 if case == "bf16" else TOLERANCE
            for key, values in expected.items():
                if key == "eval_loss" and "tensor" in case:
                    continue  # the Trainer's is a mean of means over batches, and these are others
                assert _close(story[key], values, tolerance), f"{case}: {key}: {story[key]} {values}"
        assert _close(resumed["loss"], expected["loss"], TOLERANCE)
        assert _close(resumed["predictions"], expected["predictions"], 10 * TOLERANCE)
    _check_files(tmp_path, adapters)


def _close(found: Any, expected: Any, tolerance: float) -> bool:
    one, other = torch.tensor(found), torch.tensor(expected)
    return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def _check_files(folder: Path, adapters: bool) -> None:
    """Weights are where `from_pretrained` looks for them, as the Trainer writes them; of adapters, these alone."""
    from safetensors.torch import load_file

    case, name = ("adapters", "adapter_model.safetensors") if adapters else ("zero3", "model.safetensors")
    real, ours = (load_file(folder / run / "final" / name) for run in ("real", case))
    assert ours.keys() == real.keys()
    for key, weight in real.items():
        torch.testing.assert_close(ours[key], weight, rtol=1e-4, atol=1e-4)


def again(kind: Any, folder: Path, *, looks: bool, **extra: Any) -> list[Any]:
    """Trains twice; `looks`: evaluates before."""
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", seed=1, logging_steps=1,
        max_steps=2, per_device_train_batch_size=2, learning_rate=2e-2, save_strategy="no",
    )  # fmt: skip
    data = _texts(16)
    trainer = kind(_model(adapters=False), args, train_dataset=data, eval_dataset=data[:6], **extra)
    if looks:
        trainer.evaluate()
    found = [trainer.train().training_loss, trainer.evaluate()["eval_loss"]]
    return [*found, trainer.train().training_loss, trainer.evaluate()["eval_loss"]]


def run_again(rank: int, size: int, folder: Path) -> list[list[Any]]:
    from plait.frontends.transformers import PlaitTrainer

    _reset()
    # After an evaluation the Trainer itself leaves out DistributedDataParallel, and ranks drift apart: so not there.
    stories = [again(transformers.Trainer, folder / "real", looks=False)]
    for word in ("zero3", "ddp"):
        _reset()
        stories.append(again(PlaitTrainer, folder / word, looks=True, sections={"strategy": word}))
    return stories


def test_trainer_looks_before_it_trains_and_trains_twice(two_ranks: RankPool, tmp_path: Path) -> None:
    for real, *ours in two_ranks.run(run_again, tmp_path):
        for story in ours:
            assert story == pytest.approx(real, rel=TOLERANCE)
