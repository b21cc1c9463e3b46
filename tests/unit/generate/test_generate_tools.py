"""Tools over HTTP: written down by the chat template, and read from the answer where the template has such calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.refusals import refused
from tests.unit.generate.test_generate_serve import asking, serving

from plait.cli.generate import open_conversation
from plait.generate.batch import ContinuousBatch, GenerationRow, Token
from plait.generate.conversation import Conversation, ToolCall, ToolReader, read_calls
from plait.posttrain.data.template import ChatTokenizer

HERMES = (
    "{% if tools %}system: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASKED: list[Any] = [{"role": "user", "content": "Rain in Köln?"}]


def opened(tokenizer: ChatTokenizer, folder: Path, template: str) -> Conversation:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.end,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return open_conversation(str(folder))


@pytest.fixture(scope="module")
def hermes(tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    return opened(tokenizer, tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture
def says(hermes: Conversation, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says next, in place of what it would choose."""
    script: list[str] = [""]
    left: list[int] = []
    add, step = ContinuousBatch.add, ContinuousBatch.step

    def first(batch: ContinuousBatch, rows: Sequence[GenerationRow]) -> list[Token]:
        add(batch, rows)
        left[:] = [*hermes.tokenizer.encode(script[0]), hermes.tokenizer.end]
        return [Token(left.pop(0), -1.0, [])]

    def following(batch: ContinuousBatch) -> list[Token]:
        step(batch)
        return [Token(left.pop(0), -1.0, [])]

    monkeypatch.setattr(ContinuousBatch, "add", first)
    monkeypatch.setattr(ContinuousBatch, "step", following)
    return script


SAID: list[tuple[str, str, list[str]]] = [
    (CALL, "", ["Köln"]),
    (f"I look it up. {CALL}\n{CALL.replace('Köln', 'Bonn')}", "I look it up. ", ["Köln", "Bonn"]),
    ("It is <tool dry>, a < b", "It is <tool dry>, a < b", []),
    ("<tool_call>\n{not JSON}\n</tool_call>", "<tool_call>\n{not JSON}\n</tool_call>", []),
    (CALL[:40], CALL[:40], []),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("said", "content", "cities"), SAID)
def test_calls_are_read_from_the_answer(
    hermes: Conversation, says: list[str], stream: bool, said: str, content: str, cities: list[str]
) -> None:
    says[0] = said
    wanted: dict[str, Any] = {"model": hermes.name, "messages": ASKED, "tools": [WEATHER], "max_tokens": 512}
    with serving(hermes, max_new_tokens=512) as server, asking(server) as client:
        if stream:
            events = [event.choices[0] for event in client.chat.completions.create(stream=True, **wanted)]
            found = "".join(event.delta.content or "" for event in events)
            calls: list[Any] = [call for event in events for call in event.delta.tool_calls or []]
            assert [call.index for call in calls] == list(range(len(cities)))
            reason = events[-1].finish_reason
        else:
            (choice,) = client.chat.completions.create(**wanted).choices
            found, calls, reason = choice.message.content or "", choice.message.tool_calls or [], choice.finish_reason
    assert found == content
    assert [call.function.name for call in calls] == ["weather"] * len(cities)
    assert [json.loads(call.function.arguments)["city"] for call in calls] == cities
    assert len({call.id for call in calls}) == len(calls)
    assert reason == ("tool_calls" if cities else "stop")


def test_tools_calls_and_their_results_reach_the_prompt(hermes: Conversation, says: list[str]) -> None:
    prompts: list[str] = []
    with_tools = hermes.write_with_tools
    assert with_tools is not None

    def watched(turns: Any, tools: Any) -> list[int]:
        tokens: list[int] = with_tools(turns, tools)
        prompts.append(hermes.tokenizer.decode(tokens))
        return tokens

    speaker = replace(hermes, write_with_tools=watched)
    with serving(speaker, max_new_tokens=512) as server, asking(server) as client:
        usual: dict[str, Any] = {"model": hermes.name, "max_tokens": 512}
        says[0] = CALL
        answer = client.chat.completions.create(messages=ASKED, tools=[WEATHER], **usual).choices[0].message
        assert answer.tool_calls is not None
        assert "The weather of a city." in prompts[0]
        result: Any = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "no rain"}
        says[0] = "No."
        known: Any
        for known in (answer, answer.model_dump()):
            again = client.chat.completions.create(messages=[*ASKED, known, result], tools=[WEATHER], **usual)
            assert again.choices[0].message.content == "No."
            assert '<tool_call>\n{"name": "weather", "arguments": {"city": "K' in prompts[-1]
            assert "tool: no rain" in prompts[-1]
        count = len(prompts)
        client.chat.completions.create(messages=ASKED, tools=[WEATHER], tool_choice="none", **usual)
        assert len(prompts) == count, "without a choice there are no tools"


@pytest.mark.parametrize("template", [PLAIN, MISTRAL])
def test_a_template_without_such_calls_refuses_tools_by_name(
    tokenizer: ChatTokenizer, tmp_path: Path, template: str
) -> None:
    speaker = opened(tokenizer, tmp_path, template)
    assert speaker.write_with_tools is None
    with serving(speaker) as server, asking(server) as client:
        usual: dict[str, Any] = {"model": speaker.name, "max_tokens": 2}
        with refused(openai.BadRequestError, "tools:", "<tool_call>"):
            client.chat.completions.create(messages=ASKED, tools=[WEATHER], **usual)
        result: Any = {"role": "tool", "tool_call_id": "x", "content": "dry"}
        with refused(openai.BadRequestError, "tools:", "<tool_call>", "role"):
            client.chat.completions.create(messages=[*ASKED, result], **usual)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"logprobs": True}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "x", "strict": True}}]}, "strict"),
    ({"tools": [{"type": "retrieval"}]}, r"tools\.0\.type"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "content"),
]


def test_what_cannot_be_kept_is_refused_by_name(hermes: Conversation) -> None:
    with serving(hermes) as server, asking(server) as client:
        for wanted, named in WRONG:
            body: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER], **wanted}
            with pytest.raises(openai.BadRequestError, match=named):
                client.chat.completions.create(model=hermes.name, max_tokens=2, **body)


def test_text_that_may_begin_a_call_is_held_back() -> None:
    reader = ToolReader()
    shown = [reader.push(piece) for piece in ("a <to", "ol", " b <tool_", "call>{", "x")]
    assert shown == ["a ", "", "<tool b ", "", ""]
    assert reader.finish() == ("<tool_call>{x", [])
    assert read_calls(CALL + CALL) == [ToolCall("weather", {"city": "Köln"})] * 2
    assert read_calls(CALL + " and more") is None
