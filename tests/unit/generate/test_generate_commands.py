"""`plait generate`, `plait chat` and `plait serve` on folders: a checkpoint of a run, and one of Hugging Face."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing

from plait.cli import generate as serving
from plait.cli.generate import Opening, open_conversation
from plait.cli.main import main
from plait.generate.conversation import AnswerPiece, Conversation, Turn
from plait.generate.options import Sampling
from plait.generate.serve import Limits, Server
from plait.models.llama import Llama
from plait.posttrain.data.template import ChatTokenizer
from plait.posttrain.run import phase_runner

SIZES: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 2, "seq_len": 128}


@pytest.fixture(scope="module")
def hf_folder(tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of `transformers` with a chat template and two tokens that end an answer."""
    from transformers import LlamaConfig as Theirs
    from transformers import LlamaForCausalLM

    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("hf") / "small-llama"
    size = tokenizer.vocab_size
    config = Theirs(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=[0, 5],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: str, said: str | None = None) -> int:
    monkeypatch.setattr(sys, "argv", ["plait", *words])
    if said is not None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_hugging_face_folder_opens_as_plaits_own_model_with_its_template_and_ends(hf_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    speaker = open_conversation(str(hf_folder))
    assert isinstance(speaker.generator.model, Llama)
    assert set(speaker.stop) == {0, 5}
    prompt = speaker.encode_conversation([Turn("user", "the fox")]).tokens
    assert speaker.tokenizer.decode(prompt) == "user: the fox\nassistant:"
    ((_, completion),) = speaker.write([prompt], Sampling(12, temperature=0.0))
    theirs = AutoModelForCausalLM.from_pretrained(hf_folder)
    ids = torch.tensor([prompt])
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(prompt) :]
    assert completion.tokens == expected.tolist()


def test_generate_shows_models_side_by_side_and_how_well_they_expect_a_text(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = '{"prompt": "the <quick>"}\n\n{"text": "a\u2028plait"}\n'
    (tmp_path / "prompts.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
    page = tmp_path / "page.html"
    words = ["generate", str(hf_folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--tokens", "6"]
    more = ["--against", str(hf_folder), "--html", str(page), "--perplexity", str(tmp_path / "text.txt")]
    assert call(monkeypatch, *words, *more) == 0
    text = page.read_text()
    assert text.count("<tr>") == 1 + 2 + 1
    assert "the &lt;quick&gt;" in text
    found = re.findall(r"perplexity ([\d.]+) over (\d+) tokens", capsys.readouterr().out)
    assert len(found) == 2
    assert found[0] == found[1]
    assert float(found[0][0]) > 100  # it has learned nothing


WRONG: list[tuple[list[str], str]] = [
    (["generate", "PATH", "--against", "PATH"], "--html"),
    (["generate", "PATH", "--prompts", "PATH/missing.txt"], "missing.txt"),
    (["generate", "PATH", "--prompts", "PATH/nothing.txt"], "has no prompt in it"),
    (["generate", "PATH", "--prompts", "PATH/third.jsonl"], "third.jsonl, line 3"),
    (["generate", "PATH", "--prompt", "a \udcff"], "half of a character"),
    (["generate", "PATH", "--prompt", "word " * 200], "64"),
    (["generate", "PATH", "--offload", "cpu"], "convert the model"),
    (["generate", "PATH", "--tokenizer", "nowhere"], "nowhere"),
    (["serve", "PATH", "--no-token", "--host", "0.0.0.0"], "--no-token"),
    (["serve", "PATH", "--token-file", "PATH/config.json"], "one word"),
    (["chat", "--path", "PATH/missing"], "missing"),
]


def test_what_cannot_be_used_is_named(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (hf_folder / "nothing.txt").write_text("\n\n")
    (hf_folder / "third.jsonl").write_text('{"prompt": "one"}\n\n{"question": "two"}\n')
    for words, said in WRONG:
        assert call(monkeypatch, *(word.replace("PATH", str(hf_folder)) for word in words)) == 2, words
        assert said in capsys.readouterr().err, words


def test_a_conversation_goes_on_turn_by_turn_and_can_be_taken_back(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--path", str(hf_folder), "--temperature", "0", "--tokens", "5"]

    def talk(*lines: str) -> list[str]:
        assert call(monkeypatch, "chat", *options, said="".join(f"{line}\n" for line in lines)) == 0
        return capsys.readouterr().out.split("\n")

    first, second = talk("hi", "you")[:2]
    assert first
    assert talk("hi", "/undo", "hi")[:2] == [first, first]
    assert talk("you", "/clear", "hi", "you", "/quit", "hi")[1:3] == [first, second]
    assert talk("/exit", "hi") == [""]
    assert call(monkeypatch, "chat", *options, said="/nothing\nhi\n") == 0
    out, err = capsys.readouterr()
    assert not missing(err, "/nothing", "/clear", "/undo", "/quit")
    assert out.split("\n")[0] == first
    assert call(monkeypatch, "chat", *options, said="caf\udce9\nhi\n") == 0
    out, err = capsys.readouterr()
    assert not missing(err, "UTF-8", "udce9")
    assert out.split("\n")[0] == first
    assert call(monkeypatch, "chat", *options, said="word " * 200 + "\nhi\n") == 0
    out, err = capsys.readouterr()
    assert not missing(err, "tokens", " 64")
    assert out.split("\n")[0] == first


def test_serve_listens_and_shows_a_link_with_a_new_token(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Once(Server):
        def run(self) -> None:
            thread = threading.Thread(target=super().run)
            thread.start()
            with urllib.request.urlopen(f"{self.url}/health") as answer:
                assert answer.status == 200
            self.stop()
            thread.join()

    monkeypatch.setattr(serving, "Server", Once)
    for _ in range(2):
        serving.serve(
            str(hf_folder), Opening(), host="127.0.0.1", port=0, token_file=None, open_to_all=False, limits=Limits()
        )
    tokens = re.findall(r"#token=(\S{20,})", capsys.readouterr().out)
    assert len(set(tokens)) == 2


def test_serve_without_its_extra_is_refused_before_a_model_is_opened() -> None:
    """In a process of its own: here the server is loaded, and stays in the front doors that offer it."""
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv[0] = 'plait'; from plait.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve", "no-such-folder"], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert not missing(done.stderr, "plait[serve]")


def test_a_port_in_use_is_named(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert call(monkeypatch, "serve", str(hf_folder), "--port", port) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_in_good_order_when_it_is_stopped_while_it_answers(hf_folder: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "plait", "serve", str(hf_folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "#token=" in line)
            url, token = re.findall(r"(http://\S+)/#token=(\S+)", line)[0]
            body = {"prompt": "the", "max_tokens": 50, "temperature": 0, "stream": True}
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as answer:
                first = answer.readline()
                process.send_signal(number)
                rest = answer.read()
            assert first.startswith(b"data: ")
            assert rest.endswith(b"data: [DONE]\n\n")
            assert b'"finish_reason": "' in first + rest
            assert process.wait(60) == 0
            assert process.stdout.read().endswith("stopped\n")
        finally:
            process.kill()


def test_chat_shows_control_characters_of_the_model_and_does_not_send_them_to_the_terminal(
    hf_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        Conversation, "stream", lambda *_: iter([AnswerPiece("a\x1b[2Jb\r\n", None), AnswerPiece("\x07\tc", "stop")])
    )
    assert call(monkeypatch, "chat", "--path", str(hf_folder), said="hi\n") == 0
    assert capsys.readouterr().out == "a\\x1b[2Jb\\r\n\\x07\tc\n"


def train(sections: dict[str, Any]) -> None:
    with phase_runner("sft", sections) as runner:
        runner.train()


def test_a_run_of_a_phase_answers_in_its_own_template_with_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {
        "work_dir": "base",
        "device": "cpu",
        "model": {"type": "llama", "vocab_size": 64, **SIZES},
        "posttrain": {"data": [{"type": "task", "samples": 16}], "template": {"kind": "marked"}},
        "optim": {"lr": 0.1},
        "train": {"max_steps": 1},
        "batch": {"micro": 2},
    }
    train(sections)
    sections |= {"lora": {"rank": 2}, "posttrain": {**sections["posttrain"], "start": "base"}}
    for folder, part in (("whole", False), ("part", True)):
        train({**sections, "work_dir": folder, "checkpoint": {"trainable_only": part}})
    sampling, prompts = Sampling(20, temperature=0.0), [[3, 4, 5], [9]]
    ways = [("base", Opening()), ("whole", Opening()), ("part", Opening()), ("base", Opening(adapter="part/adapter"))]
    speakers = [open_conversation(path, opening) for path, opening in ways]
    base, whole, part, added = (speaker.generator.generate(prompts, sampling) for speaker in speakers)
    assert base[0].logprobs != whole[0].logprobs
    for other in (part, added):
        assert [each.tokens for each in other] == [each.tokens for each in whole]
    for speaker in speakers:
        assert isinstance(speaker.tokenizer, ChatTokenizer)
        assert {"<|im_end|>", speaker.tokenizer.token_id("<|im_end|>")} & set(speaker.stop), "what ends a turn"
    assert not any("lora" in name for name, _ in speakers[1].generator.model.named_parameters()), "adapters are merged"
    assert speakers[1].generator.context == SIZES["seq_len"]
    capsys.readouterr()
    assert call(monkeypatch, "generate", "part", "--prompt", "cab=", "--tokens", "4") == 0
    assert capsys.readouterr().out.startswith("cab=")
