"""Rows that join and leave a running batch get what they would get alone; text comes in pieces that add up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.unit.generate.test_generate_batch import KINDS, make, some_prompts

from plait.errors import ContextError
from plait.generate import Generator, Sampling
from plait.generate.batch import ContinuousBatch, GenerationRow, Token
from plait.generate.conversation import AnswerText, Conversation, Turn, cut, printable
from plait.kernels.decode.sampling import CounterRNG, with_seed

SAMPLINGS = [
    Sampling(12, temperature=0.0),
    Sampling(9, temperature=1.0, seed=7),
    Sampling(14, temperature=0.7, top_k=5, seed=1 << 40),
    Sampling(5, temperature=1.3, top_p=0.8, repetition_penalty=1.2, seed=3),
    Sampling(11, temperature=0.0, repetition_penalty=1.5),
    Sampling(7, temperature=1.0, seed=2**63 - 1),
]


@pytest.fixture(autouse=True)
def _fixed_inputs() -> None:
    random.seed(5)
    torch.manual_seed(5)


def written(batch: ContinuousBatch, rows: list[GenerationRow], joins: dict[int, list[int]]) -> list[list[Token]]:
    """The tokens of all rows; `joins` says before which step which of them join."""
    found: list[list[Token]] = [[] for _ in rows]
    live: list[int] = []
    step = 0
    while live or joins:
        new = joins.pop(step, [])
        if new:
            for number, token in zip(new, batch.add([rows[number] for number in new]), strict=True):
                found[number].append(token)
            live += new
        elif live:
            for number, token in zip(live, batch.step(), strict=True):
                found[number].append(token)
        kept = [place for place, number in enumerate(live) if len(found[number]) < rows[number].max_new_tokens]
        batch.keep(kept)
        live = [live[place] for place in kept]
        step += 1
    return found


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_joins_gets_what_it_would_get_alone(kind: str, cache: bool) -> None:
    model, prompts = make(kind), some_prompts(6)
    generator = Generator(model, cache=cache)
    alone = [
        generator.generate([prompt], sampling, keys=[key])[0]
        for key, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]
    rows = [
        generator.row(prompt, sampling, key=key, top=key % 3)
        for key, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]
    model.train()
    with generator.continuous() as batch:
        assert not model.training
        grows = not kind.startswith("transformers") or not cache
        joins = {0: [0, 1], 3: [2, 3], 4: [4], 20: [5]} if grows else {0: [0, 1, 2, 3, 4, 5]}
        found = written(batch, rows, joins)
    assert model.training
    for key, (tokens, expected) in enumerate(zip(found, alone, strict=True)):
        assert [token.id for token in tokens] == expected.tokens, key
        torch.testing.assert_close(
            torch.tensor([token.logprob for token in tokens]), torch.tensor(expected.logprobs), rtol=0, atol=2e-5
        )
        for token in tokens:
            assert len(token.top) == key % 3
            values = [logprob for _, logprob in token.top]
            assert values == sorted(values, reverse=True)
            assert dict(token.top).get(token.id, token.logprob) == pytest.approx(token.logprob, abs=2e-5)


def test_a_batch_that_cannot_grow_says_so_and_takes_rows_once_it_is_empty() -> None:
    generator = Generator(make("transformers llama"))
    rows = [generator.row(prompt, Sampling(4, temperature=0.0)) for prompt in some_prompts(2)]
    with generator.continuous() as batch:
        assert batch.takes(rows)
        batch.add(rows[:1])
        assert not batch.takes(rows[1:])
        batch.keep([])
        assert batch.takes(rows[1:])


def test_a_model_that_is_not_told_where_rows_begin_gets_prompts_of_one_length_only() -> None:
    model = make("transformers llama")
    generator = Generator(model)
    generator._decoder.mixes_lengths = False
    rows = [GenerationRow([1] * length, Sampling(2), 2) for length in (3, 4, 3)]
    with generator.continuous() as batch:
        assert not batch.takes(rows)
        assert batch.takes([rows[0], rows[2]])


def test_seeds_share_a_batch_as_keys() -> None:
    counts = torch.arange(4)
    for seed in (0, 1, 2**31, 2**63 - 1):
        for key in (0, 3, 2**40 + 9):
            folded = torch.tensor([with_seed(key, seed)] * 4)
            assert (
                CounterRNG(folded, counts, 0).bits().tolist()
                == CounterRNG(torch.tensor([key] * 4), counts, seed).bits().tolist()
            )


TEXTS = ["naïve café — plait", "🙂🙃 strands 漢字 woven", "the quick\tbrown\n\nfox", "e\u0301 and \u200d joined"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_text_add_up_and_no_half_character_shows(speaker: Conversation, text: str) -> None:
    tokens = speaker.tokenizer.encode(text)
    said = AnswerText(speaker.tokenizer.decode, (), ())
    pieces = [said.push(token) for token in tokens]
    assert "".join(pieces) + said.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 3


def test_bytes_that_are_no_characters_do_not_hold_an_answer_back(speaker: Conversation) -> None:
    byte = next(token for token in range(speaker.tokenizer.vocab_size) if speaker.tokenizer.decode([token]) == "\ufffd")
    said = AnswerText(speaker.tokenizer.decode, (), ())
    pieces = [said.push(byte) for _ in range(500)]
    assert len("".join(pieces)) > 480
    assert len("".join(pieces) + said.finish()) == 500
    assert len(said._window) < 32


@pytest.mark.parametrize(
    "stop", [["brown"], ["own f", "quick b"], ["k brown fox j"], ["lazy dog!"], ["o", "ow"], ["🙂"]]
)
def test_a_stop_text_across_tokens_never_shows_in_part(speaker: Conversation, stop: list[str]) -> None:
    text = "the quick brown fox jumps over the lazy dog 🙂 and on"
    said = AnswerText(speaker.tokenizer.decode, (), stop)
    shown = ""
    for token in speaker.tokenizer.encode(text):
        shown += said.push(token)
        assert cut(text, stop).startswith(shown)
        if said.stopped:
            break
    shown += said.finish()
    assert shown == cut(text, stop)
    assert said.stopped == (shown != text)
    assert said.length == len(shown)


def test_text_that_was_held_back_comes_when_the_answer_ends_without_the_stop_text(speaker: Conversation) -> None:
    tokenizer = speaker.tokenizer
    said = AnswerText(tokenizer.decode, (tokenizer.end,), ["brown fox"])
    shown = "".join(said.push(token) for token in [*tokenizer.encode("the quick brown"), tokenizer.end])
    assert said.stopped
    assert not shown.endswith("b")
    assert shown + said.finish() == "the quick brown"


def test_a_stop_text_that_is_a_special_token_ends_an_answer(speaker: Conversation) -> None:
    """Decoding leaves such tokens out, so that their text is found nowhere."""
    end = speaker.tokenizer.end
    (text,) = [speaker.tokenizer.decode([end], keep_special=True)]
    sampling = speaker.row([1, 2], Sampling(8, stop=(text, "the"))).sampling
    assert sampling.stop_tokens == (end,)
    said = speaker.text_of(Sampling(8, stop=(text,)))
    assert said.push(end) == ""
    assert said.stopped


def test_a_stream_is_what_a_whole_answer_is(speaker: Conversation) -> None:
    prompt = speaker.tokenizer.encode("the quick")
    for sampling in (Sampling(40, seed=3), Sampling(40, temperature=0.0), Sampling(40, seed=3, stop=("e", "qu"))):
        ((text, completion),) = speaker.write([prompt], sampling)
        pieces = list(speaker.stream(prompt, sampling))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [completion.finish_reason]


def counting(speaker: Conversation) -> tuple[Conversation, list[int]]:
    """A speaker, and how many turns each of its calls wrote down."""
    calls: list[int] = []

    def write_down(turns: Any) -> list[int]:
        assert turns[0].role in ("system", "user"), "a template may insist on a question first"
        calls.append(len(turns))
        return speaker.write_down(turns)

    return Conversation("tiny", speaker.generator, speaker.tokenizer, write_down, ()), calls


@pytest.mark.parametrize("system", [True, False])
def test_a_long_conversation_is_not_written_down_for_each_turn(speaker: Conversation, system: bool) -> None:
    counted, calls = counting(speaker)
    turns = [Turn("system", "be brief")] if system else []
    for number in range(2500):
        turns += [Turn("user", f"question {number}"), Turn("assistant", "an answer")]
    turns.append(Turn("user", "the last one"))
    asked = counted.encode_conversation(turns)
    assert sum(calls[1:]) < 200
    # As many questions as fit, and not one more.
    context = speaker.generator.context
    assert context is not None
    assert len(asked.tokens) + 16 <= context
    begin = asked.left_out + int(system)
    longer = [*turns[: int(system)], *turns[begin - 2 :]]
    assert len(speaker.write_down(longer)) + 16 > context


def test_a_last_turn_that_is_too_long_is_refused_with_its_length(speaker: Conversation) -> None:
    with pytest.raises(ContextError, match="256"):
        speaker.encode_conversation([Turn("user", "a"), Turn("assistant", "b"), Turn("user", "word " * 600)])


def test_what_steers_a_terminal_is_shown_and_what_belongs_to_a_text_stays() -> None:
    assert printable("a\x1b[2J\r\n\x9b1m\u202eb\ud83d") == r"a\x1b[2J\r\n\x9b1m\u202eb\ud83d"
    text = "naïve\u00a0漢字\u3000👨\u200d👩 می\u200cخواهم\n\tx"
    assert printable(text, keep="\n\t") == text
