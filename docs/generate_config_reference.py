"""Writes the tables of `configuration.md` from the section classes, so that the reference cannot drift.

    python docs/generate_config_reference.py          # writes them between the two marks of each page
    python docs/generate_config_reference.py --check  # only says whether a page is out of date

What a key means is read from the text under it in the source; a key whose name and default say it all has none
there, and gets its words here, in `WORDS`. A key without any words, or words without a key, is an error.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from plait.config.base import Section
from plait.config.part import CustomPart
from plait.config.run import RunConfig
from plait.config.schema import custom_section, items, sections

DOCS = Path(__file__).parent
PAGES = (DOCS / "configuration.md", DOCS / "zh-CN" / "configuration.md")
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"

# By the class that declares the key.
WORDS: dict[str, str] = {
    "RunConfig.work_dir": "Everything a run writes goes here: `config.yaml`, events, checkpoints, the report.",
    "RunConfig.seed": "Seed of initial values, sample order and dropout.",
    "RunConfig.device": "`auto`: cuda, else xpu, else mps (one process only), else cpu.",
    "RunConfig.model": "The model; absent if a module is passed from Python.",
    "RunConfig.data": "Training data; absent if data are passed from Python.",
    "RunConfig.val_data": "Validation data; the types are those of `data`.",
    "RunConfig.test_data": "Data of `Runner.test`; absent: `val_data`. The types are those of `data`.",
    "RunConfig.batch": "Batch size, micro-batch size and accumulation.",
    "RunConfig.optim": "The optimizer. Without a `type` it is AdamW.",
    "RunConfig.schedule": "The learning rate over time. Absent: constant.",
    "RunConfig.precision": "Dtypes. A string sets `compute`.",
    "RunConfig.strategy": "How training is distributed. A string is short for keys.",
    "RunConfig.plan": "The memory plan before a run; see plan.md. A string sets `gate`.",
    "RunConfig.train": "Length, validation, clipping.",
    "RunConfig.checkpoint": "When checkpoints are saved, which are kept, which one to resume from.",
    "RunConfig.log": "What is logged.",
    "RunConfig.hooks": "Code that runs at named points of a run.",
    "GptConfig.vocab_size": "Vocabulary size.",
    "GptConfig.dim": "Width; a multiple of `heads`.",
    "GptConfig.layers": "Number of blocks.",
    "GptConfig.heads": "Attention heads.",
    "GptConfig.seq_len": "Longest sequence: positions are learned, and end here.",
    "GptConfig.dropout": "Share of activations dropped in training.",
    "GptConfig.bias": "Whether linear layers and norms have a bias.",
    "GptConfig.tie_embeddings": "The output layer shares the embedding's weight.",
    "LlamaConfig.vocab_size": "Vocabulary size.",
    "LlamaConfig.dim": "Width; a multiple of `heads`, with an even head size.",
    "LlamaConfig.layers": "Number of blocks.",
    "LlamaConfig.heads": "Attention heads.",
    "LlamaConfig.rope_base": "Base of the rotary frequencies.",
    "LlamaConfig.norm_eps": "Added inside RMSNorm.",
    "LlamaConfig.tie_embeddings": "The output layer shares the embedding's weight.",
    "ResNetConfig.depth": "Number of layers; 50 and more have bottleneck blocks.",
    "ResNetConfig.classes": "Number of classes.",
    "HFConfig.task": "The `transformers` Auto class that builds the model.",
    "_TextSection.seq_len": "Tokens per sequence. Absent: the default, or `model.seq_len` if that is smaller.",
    "_TextSection.val_fraction": "Share of the documents in the `val` part.",
    "TokensData.path": "The token file, as `plait.data.TokenWriter` writes it, with or without its ending.",
    "TokensData.seq_len": "Tokens per sequence. Absent: the default, or `model.seq_len` if that is smaller.",
    "TokensData.document_mask": "Tokens attend within their own document only.",
    "TokensData.split": "`train` and `val` are the two parts of one source, split by document.",
    "TokensData.val_fraction": "Share of the documents in the `val` part.",
    "JsonlData.path": "A file, a folder or a glob.",
    "JsonlData.text_key": "The key of whole texts. Either this, or the two below.",
    "JsonlData.prompt_key": "The key of prompts, which are not trained on.",
    "JsonlData.completion_key": "The key of completions, which are trained on.",
    "ImageFolderData.path": "The folder with one folder per class.",
    "Cifar10Data.path": "The folder with the batches, or its parent.",
    "Cifar10Data.split": "One of the two published splits.",
    "Cifar10Data.augment": "Random shift and flip. Absent: on for training.",
    "_BuiltinOptim.lr": "Learning rate.",
    "_BuiltinOptim.weight_decay": "Weight decay.",
    "AdamWConfig.weight_decay": "Weight decay, decoupled from the gradient.",
    "AdamWConfig.betas": "Decay of the two moments.",
    "AdamWConfig.eps": "Added to the denominator.",
    "_Adam.amsgrad": "Use the maximum of the second moments.",
    "AdamConfig.betas": "Decay of the two moments.",
    "AdamConfig.eps": "Added to the denominator.",
    "SGDConfig.lr": "Learning rate.",
    "SGDConfig.momentum": "0: none.",
    "SGDConfig.nesterov": "Nesterov momentum.",
    "AdagradConfig.lr": "Learning rate.",
    "AdagradConfig.lr_decay": "Decay of the rate per update.",
    "AdagradConfig.eps": "Added to the denominator.",
    "LionConfig.lr": "Learning rate.",
    "LionConfig.betas": "Decay rates of the update and of the momentum.",
    "LambConfig.weight_decay": "Weight decay, part of the update that the trust ratio scales.",
    "LambConfig.betas": "Decay of the two moments.",
    "LambConfig.eps": "Added to the denominator.",
    "LambConfig.max_trust": "Upper bound of the trust ratio.",
    "LambConfig.min_trust": "Lower bound of the trust ratio.",
    "AdafactorConfig.lr": "Learning rate.",
    "AdafactorConfig.beta2_decay": "Exponent by which the second moment's decay approaches 1.",
    "AdafactorConfig.eps": "Added to squared gradients (absent: the dtype's own), and the least parameter scale.",
    "AdafactorConfig.clip_threshold": "Largest root mean square of an update.",
    "MuonConfig.lr": "Learning rate of the hidden matrices.",
    "MuonConfig.weight_decay": "Weight decay.",
    "MuonConfig.momentum": "Momentum.",
    "MuonConfig.nesterov": "Nesterov momentum.",
    "MuonConfig.ns_steps": "Newton–Schulz iterations.",
    "MuonConfig.adam_lr": "Learning rate of everything else.",
    "MuonConfig.adam_betas": "Decay of AdamW's two moments.",
    "MuonConfig.adam_eps": "Added to AdamW's denominator.",
    "_Schedule.warmup_start_factor": "Where the warm-up starts, as a factor of the rate.",
    "ConstantConfig.factor": "Factor of the rate.",
    "LinearConfig.start_factor": "Factor at the start.",
    "LinearConfig.end_factor": "Factor at the end.",
    "CosineConfig.min_factor": "Factor at the end.",
    "CosineConfig.total": "Absent: to the end of the run.",
    "CosineRestartConfig.first": "Length of the first cosine.",
    "CosineRestartConfig.multiply": "Ratio of the length of each to that of the one before.",
    "CosineRestartConfig.min_factor": "Factor at the end of each.",
    "PolynomialConfig.power": "1: a straight line.",
    "PolynomialConfig.min_factor": "Factor at the end.",
    "PolynomialConfig.total": "Absent: to the end of the run.",
    "MultiStepConfig.milestones": "Where the learning rate is multiplied by `gamma`.",
    "MultiStepConfig.gamma": "The factor at each milestone.",
    "ExponentialConfig.gamma": "The factor per unit.",
    "_DeepSpeedSchedule.by": "The unit of every length below.",
    "WarmupConfig.warmup_min_lr": "Rate at the start.",
    "WarmupConfig.warmup_num_steps": "Length of the warm-up.",
    "WarmupConfig.warmup_type": "Shape of the warm-up.",
    "WarmupDecayConfig.total_num_steps": "Step at which it reaches zero. Absent: the end of the run.",
    "WarmupDecayConfig.warmup_min_lr": "Rate at the start.",
    "WarmupDecayConfig.warmup_max_lr": "Absent: `optim.lr`.",
    "WarmupDecayConfig.warmup_num_steps": "Length of the warm-up.",
    "WarmupDecayConfig.warmup_type": "Shape of the warm-up.",
    "WarmupCosineConfig.total_num_steps": "Step at which it ends. Absent: the end of the run.",
    "WarmupCosineConfig.warmup_min_ratio": "Ratio at the start.",
    "WarmupCosineConfig.warmup_num_steps": "Length of the warm-up.",
    "WarmupCosineConfig.cos_min_ratio": "Ratio at the end.",
    "WarmupCosineConfig.warmup_type": "Shape of the warm-up.",
    "OneCycleConfig.cycle_min_lr": "Rate at both ends of the cycle.",
    "OneCycleConfig.cycle_max_lr": "Rate in its middle.",
    "OneCycleConfig.decay_lr_rate": "Decay of the rate after the cycle.",
    "OneCycleConfig.cycle_first_step_size": "Length of the warm-up.",
    "OneCycleConfig.cycle_second_step_size": "Length of the second half of the cycle. Absent: that of the first.",
    "OneCycleConfig.cycle_first_stair_count": "Steps in the first half of the cycle; 0: continuous.",
    "OneCycleConfig.cycle_second_stair_count": "Steps in the second half of the cycle. Absent: as in the first.",
    "OneCycleConfig.decay_step_size": "Length of one unit of decay; 0: no decay.",
    "OneCycleConfig.cycle_momentum": "Cycle the momentum too, in the opposite direction.",
    "OneCycleConfig.cycle_min_mom": "Momentum in the middle of the cycle.",
    "OneCycleConfig.cycle_max_mom": "Momentum at both ends.",
    "OneCycleConfig.decay_mom_rate": "Decay of the momentum after the cycle.",
    "LRRangeTestConfig.lr_range_test_min_lr": "Rate at the start.",
    "LRRangeTestConfig.lr_range_test_step_size": "Length of one unit of the increase.",
    "LRRangeTestConfig.lr_range_test_step_rate": "Increase per unit, as a share of the lowest rate.",
    "LRRangeTestConfig.lr_range_test_staircase": "Increase once per unit instead of continuously.",
    "WSDConfig.min_factor": "Factor at the end.",
    "ScalerConfig.static": "A constant scale.",
    "ScalerConfig.minimum": "The smallest scale.",
    "PrecisionConfig.compute": "Dtype of parameters and activations in forward and backward.",
    "PrecisionConfig.reduce": "Dtype in which gradients are reduced over ranks.",
    "PrecisionConfig.scaler": "Loss scaling, for fp16 only.",
    "CompileConfig.enabled": "Whether to compile; any option enables it.",
    "CompileConfig.backend": "Of `torch.compile`.",
    "CompileConfig.mode": "Of `torch.compile`.",
    "CompileConfig.dynamic": "Of `torch.compile`.",
    "CompileConfig.fullgraph": "Of `torch.compile`.",
    "StrategyConfig.zero": "ZeRO stage. Absent: 0, or that of `sharding`.",
    "StrategyConfig.layout": "Sizes of the mesh axes.",
    "StrategyConfig.wrap": "Modules that are sharded, recomputed and compiled as one unit.",
    "StrategyConfig.backward_prefetch": "The same for the backward pass.",
    "StrategyConfig.recompute": "Activation checkpointing. A string sets `mode`.",
    "StrategyConfig.compile": "`torch.compile`. `true` is enough.",
    "GuardConfig.enabled": "False: such a step is applied anyway (never in fp16).",
    "TrainConfig.max_epochs": "Length in epochs. Either this or `max_steps`.",
    "TrainConfig.max_steps": "Length in optimizer steps.",
    "TrainConfig.clip_norm": "Largest norm of all gradients together.",
    "TrainConfig.clip_value": "Largest absolute value of a gradient's elements. Not together with `clip_norm`.",
    "TrainConfig.guard": "Handling of steps with a loss or gradient that is not finite.",
    "BestConfig.metric": "Name of a metric that validation reports.",
    "BestConfig.mode": "`min`: lower is better; `max`: higher is better.",
    "CheckpointConfig.best": "Save after the best validation so far, and point the link `best` at it.",
    "LogConfig.sinks": "Sinks besides the console.",
    "LogConfig.wandb_project": "With the sink `wandb`. Absent: `plait`.",
    "EmaConfig.decay": "Decay of the average per update.",
    "EmaConfig.every": "Steps between two updates of the average.",
    "EarlyStopConfig.metric": "Name of a metric that validation reports.",
    "EarlyStopConfig.mode": "`min`: lower is better; `max`: higher is better.",
    "EarlyStopConfig.min_delta": "The smallest change that is an improvement.",
}


def reference() -> str:
    """All tables, as Markdown."""
    return "\n".join(_Reference().lines())


def with_reference(page: str) -> str:
    """A page with the tables, fresh, between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


class _Reference:
    """One pass over the sections, each class described once."""

    def __init__(self) -> None:
        self._seen: set[type[Section]] = set()
        self._used: set[str] = set()

    def lines(self) -> Iterator[str]:
        yield from self._section(RunConfig, "", "Top level")
        if unused := sorted(WORDS.keys() - self._used):
            raise SystemExit(f"words without a key, or with a text in the source besides: {', '.join(unused)}")

    def _section(self, section: type[Section], path: str, title: str) -> Iterator[str]:
        self._seen.add(section)
        tag = section.model_fields.get("type")
        yield f"### {title}"
        yield ""
        yield _text(inspect.getdoc(section) or "")
        yield ""
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        if issubclass(section, CustomPart):
            yield "| `type` | `package.module:name`, or a plug-in's name | **required** | see write-your-own.md |"
        elif tag is not None:
            yield f"| `type` | `{tag.default}` | | selects this type of `{path}` |"
        for name, info in section.model_fields.items():
            if name != "type":
                cells = (f"`{name}`", _type(info.annotation, info.metadata), _default(info), self._words(section, name))
                yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""
        for name, info in section.model_fields.items():
            inner = f"{path}.{name}" if path else name
            entry = items(info.annotation)
            for annotation in (info.annotation, *entry):
                for type_name, inner_section in sections(annotation).items():
                    if inner_section not in self._seen:
                        where = f"{inner}[]" if annotation in entry else inner
                        yield from self._section(
                            inner_section, inner, f"`{where}`" + (f", `type: {type_name}`" if type_name else "")
                        )
                part = custom_section(annotation)
                if part is not None and part not in self._seen:
                    where = f"{inner}[]" if annotation in entry else inner
                    yield from self._section(part, inner, f"`{where}`, custom")

    def _words(self, section: type[Section], name: str) -> str:
        owner = next(base for base in section.__mro__ if name in inspect.get_annotations(base))
        written = _texts(owner).get(name)
        if written is not None:
            return _text(written)
        key = f"{owner.__name__}.{name}"
        if key not in WORDS:
            raise SystemExit(f"{key} has no words: write a text under it in the source, or add it to WORDS")
        self._used.add(key)
        return WORDS[key]


def _texts(section: type[Section]) -> dict[str, str]:
    """The text under each key in the source of a class."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, follower in zip(definition.body, definition.body[1:], strict=False):
        match statement, follower:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def _text(text: str) -> str:
    return " ".join(text.split())


def _default(info: FieldInfo) -> str:
    if info.default_factory is None and info.default is PydanticUndefined:
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, Section):
        return "AdamW" if info.annotation is RunConfig.model_fields["optim"].annotation else "its defaults"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_yaml(each) for each in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _type(annotation: Any, metadata: Any = ()) -> str:
    """A type as a reader of the file knows it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *extra = arguments
        flat = [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        return _type(inner, [*metadata, *flat])
    if origin in (Union, UnionType):
        if all(sections(each) for each in arguments if each is not NoneType):
            return "section"
        return " or ".join(dict.fromkeys(_type(each, metadata) for each in arguments if each is not NoneType))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is tuple:
        if Ellipsis in arguments:
            return f"list of {_type(arguments[0])}"
        return f"[{', '.join(_type(each) for each in arguments)}]"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {int: "int", float: "number", str: "text", bool: "bool"}[annotation] + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    low = high = ""
    for each in metadata:
        match each:
            case Gt(gt=bound):
                low = f"> {bound:g}"
            case Ge(ge=bound):
                low = f"≥ {bound:g}"
            case Lt(lt=bound):
                high = f"< {bound:g}"
            case Le(le=bound):
                high = f"≤ {bound:g}"
    return "".join(f" {bound}" for bound in (low, high) if bound)


def main() -> None:
    """Write the pages, or with `--check` compare them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = with_reference(text)
        if text == fresh:
            continue
        if "--check" in sys.argv[1:]:
            raise SystemExit(f"{page.relative_to(DOCS)} is out of date: run python docs/generate_config_reference.py")
        page.write_text(fresh, encoding="utf-8")
        print(f"wrote {page.relative_to(DOCS)}")


if __name__ == "__main__":
    main()
