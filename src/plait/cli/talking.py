"""The commands that let a model write: `generate`, `chat` and `serve`. Loads no torch before one of them runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

ModelPath = Annotated[str, typer.Argument(help="A run's work_dir, one of its checkpoints, or a Hugging Face folder.")]
Adapter = Annotated[str | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter on top of it.")]
TokenizerFile = Annotated[str | None, typer.Option("--tokenizer", help="Absent: the one that belongs to the model.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16; auto: bf16 on a GPU, fp32 elsewhere.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run code that stored files name; otherwise it is refused.")
]
NewTokens = Annotated[int, typer.Option("--tokens", "-t", min=1, help="At most so many new tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Choose among so many likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest, up to this share.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: what came before is less likely.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends an answer. May be repeated.")]
Seed = Annotated[int, typer.Option(help="Another seed, another text.")]


def _opening(
    adapter: str | None,
    tokenizer: str | None,
    dtype: str,
    offload: str | None = None,
    offload_path: str | None = None,
    *,
    trust_code: bool,
) -> Any:
    from plait.cli.generate import DTYPES, Opening

    if dtype not in ("auto", *DTYPES):
        raise typer.BadParameter(f"--dtype {dtype}: choose auto, {', '.join(DTYPES)}")
    return Opening(adapter, tokenizer, dtype, offload, offload_path, trust_code)  # type: ignore[arg-type]


def generate(
    run_dir: ModelPath,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="To continue. May be repeated.")] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", metavar="FILE", help="Prompts: one a line, or `prompt` of a .jsonl file.")
    ] = None,
    tokens: NewTokens = 120,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = None,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    against: Annotated[
        list[str] | None, typer.Option("--against", metavar="PATH", help="Another model, for the page.")
    ] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page with all texts side by side.")] = None,
    perplexity: Annotated[
        str | None, typer.Option("--perplexity", metavar="FILE", help="Show how well a text is expected.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask prompts as `plait chat` does, in the model's template.")
    ] = False,
    held_out: Annotated[
        int | None, typer.Option("--held-out", min=1, help="Ask so many questions that the run kept for validation.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="WHO", help="Who judges: a reward model's folder, task, gsm8k, module:name."),
    ] = None,
    adapter: Adapter = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = "auto",
    trust_code: TrustCode = False,
    offload: Annotated[
        str | None, typer.Option(metavar="TIER", help="Weights that do not fit the device live in cpu or nvme memory.")
    ] = None,
    offload_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the nvme tier; absent: the checkpoint's.")
    ] = None,
) -> None:
    """Continue texts with a trained language model."""
    from plait.cli.generate import generate as run
    from plait.generate import Sampling

    sampling = Sampling(tokens, temperature, top_k, top_p, repetition_penalty, tuple(stop or ()), seed)
    opening = _opening(adapter, tokenizer, dtype, offload, offload_path, trust_code=trust_code)
    run(
        run_dir,
        prompt or [],
        sampling,
        opening,
        prompts_file=prompts,
        against=against,
        html=html,
        perplexity=perplexity,
        chat=chat,
        held_out=held_out,
        reward=reward,
    )


def chat(
    model: Annotated[
        str | None, typer.Argument(help="A run's work_dir, one of its checkpoints, or a Hugging Face folder.")
    ] = None,
    path: Annotated[str | None, typer.Option("--path", help="The same, as DeepSpeed-Chat says it.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told before anything else.")] = None,
    tokens: NewTokens = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 0.95,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    adapter: Adapter = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Talk to a trained model in the terminal."""
    if (model is None) == (path is None):
        raise typer.BadParameter("name one model: `plait chat MODEL` or `plait chat --path MODEL`")
    from plait.cli.generate import chat as run
    from plait.generate import Sampling

    sampling = Sampling(tokens, temperature, top_k, top_p, repetition_penalty, tuple(stop or ()), seed)
    run(model or path or "", sampling, _opening(adapter, tokenizer, dtype, trust_code=trust_code), system=system)


def serve(
    path: ModelPath,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    token_file: Annotated[
        str | None, typer.Option("--token-file", help="A file with the token to ask for; absent: one is made up.")
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none; on this machine only.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of one answer at most.")] = 1024,
    max_batch: Annotated[int, typer.Option(min=1, help="Answers that are written at the same time.")] = 16,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; further ones are refused.")] = 256,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of one request at most.")] = 1 << 20,
    max_messages: Annotated[int, typer.Option(min=1, help="Messages of one conversation at most.")] = 2048,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one request, waiting included.")] = 600.0,
    adapter: Adapter = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Answer over HTTP in the words of OpenAI's API, with a web page to try it."""
    from plait.generate import Limits  # isort: skip  # first: without its extra nothing else is loaded

    from plait.cli.generate import serve as run

    limits = Limits(
        body_bytes=max_body,
        messages=max_messages,
        batch_rows=max_batch,
        waiting=waiting,
        max_new_tokens=max_tokens,
        request_s=timeout,
    )
    opening = _opening(adapter, tokenizer, dtype, trust_code=trust_code)
    run(path, opening, host=host, port=port, token_file=token_file, open_to_all=no_token, limits=limits)


def add_to(app: typer.Typer) -> None:
    """Make them commands of `plait`."""
    for command in (generate, chat, serve):
        app.command()(command)
