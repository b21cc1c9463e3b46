"""Reading: every format gives the same values, and every slip names its line."""

from __future__ import annotations

import json

import pytest
from tests.refusals import refused

from plait.config.read import MAX_DEPTH, read
from plait.errors import ConfigError

EXPECTED = {"seed": 3, "optim": {"type": "SGD", "lr": 3e-4}, "hooks": [{"type": "ema"}]}
SAME = {
    "run.yaml": "seed: 3\noptim: {type: SGD, lr: 3e-4}\nhooks:\n  - type: ema\n",
    "run.yml": "seed: 3\noptim:\n  type: SGD\n  lr: 0.0003\nhooks: [{type: ema}]\n",
    "run.toml": 'seed = 3\n[optim]\ntype = "SGD"\nlr = 3e-4\n[[hooks]]\ntype = "ema"\n',
    "run.json": json.dumps(EXPECTED),
    "run.jsonc": '{"seed": 3, // three\n"optim": {"type": "SGD", /*\n*/ "lr": 3e-4,},\n"hooks": [{"type": "ema"},],}',
    "run.json5": '/* head */ {"seed": 3, "optim": {"type": "SGD", "lr": 3e-4}, "hooks": [{"type": "ema"}]} // tail',
}


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def failure(tmp_path):
    """What reading a file with this text complains about."""

    def read_and_fail(name, text):
        with pytest.raises(ConfigError) as caught:
            read(write(tmp_path, name, text))
        (problem,) = caught.value.problems
        return problem

    return read_and_fail


@pytest.mark.parametrize("name", SAME)
def test_every_format_reads_the_same(tmp_path, name):
    assert read(write(tmp_path, name, SAME[name])) == EXPECTED


def test_a_mapping_is_copied_not_kept():
    source = {"seed": 1}
    assert read(source) == source
    assert read(source) is not source


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        ("-2E+3", -2e3),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("0x1f", 31),
        ("-7", -7),
        ("0", 0),
        (".inf", float("inf")),
        ("012", "012"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("'3e-4'", "3e-4"),
        ("~", None),
        ("true", True),
        ("none", "none"),
    ],
)
def test_yaml_scalars_mean_what_they_look_like(tmp_path, written, value):
    found = read(write(tmp_path, "run.yaml", f"x: {written}\n"))["x"]
    assert found == value
    assert type(found) is type(value)


def test_comment_signs_inside_json_strings_are_text(tmp_path):
    text = r'{"a": "http://x/*y*/,]", "b": "quote \" // still text", "c": "\\"} // gone'
    expected = {"a": "http://x/*y*/,]", "b": 'quote " // still text', "c": "\\"}
    assert read(write(tmp_path, "run.json", text)) == expected


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_empty_yaml_file_is_an_empty_description(tmp_path, text):
    assert read(write(tmp_path, "run.yaml", text)) == {}


def test_an_empty_json_file_is_an_empty_description(tmp_path):
    assert read(write(tmp_path, "run.json", " \n")) == {}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b'\xef\xbb\xbf{"seed": 1}')
    assert read(path) == {"seed": 1}


def test_yaml_merge_keys_are_not_duplicates(tmp_path):
    text = "base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\n"
    assert read(write(tmp_path, "run.yaml", text))["own"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("name", "text", "place", "line"),
    [
        ("run.yaml", "a: 1\nb: [1, 2\nc: 3\n", "3:2", "c: 3"),
        ("run.yaml", "a: 1\nb: 2\na: 3\n", "3:1", "a: 3"),
        ("run.yaml", "x:\n  a: 1\n  a: 2\n", "3:3", "  a: 2"),
        ("run.yaml", "a: &x [*x]\n", "1:4", "a: &x [*x]"),
        ("run.yaml", "a: !!python/name:os.system\n", "1:4", "a: !!python/name:os.system"),
        ("run.json", '{"a": 1,\n "b": oops}', "2:7", ' "b": oops}'),
        ("run.json", '{"a": {"a": 1}, // fine\n "a": 2}', "2:2", ' "a": 2}'),
        ("run.json", '{"a": [,]}', "1:8", '{"a": [,]}'),
        ("run.json", '{"a": [1,,]}', "1:10", '{"a": [1,,]}'),
        ("run.toml", "a = 1\nb = oops\n", "2:5", "b = oops"),
        ("run.toml", 'a = "open', "1:10", 'a = "open'),
    ],
)
def test_a_slip_names_file_line_column_and_the_line_itself(failure, name, text, place, line):
    problem = failure(name, text)
    assert problem.path.endswith(f"{name}:{place}")
    quoted, caret = problem.remedy.splitlines()[-2:]
    assert quoted.endswith(f"| {line}")
    column = int(place.split(":")[1])
    assert caret.split("| ")[1].index("^") == column - 1


def test_a_duplicate_key_is_named(failure):
    assert "`lr`" in failure("run.yaml", "optim: {lr: 1, lr: 2}\n").message
    assert '"lr"' in failure("run.json", '{"optim": {"lr": 1, "lr": 2}}').message


def test_a_key_may_stand_in_two_objects_of_a_json_list(tmp_path):
    text = '{"hooks": [{"type": "ema"}, {"type": "ema"}], "type": 1}'
    assert read(write(tmp_path, "run.json", text))["type"] == 1


def test_a_tab_in_yaml_is_answered_with_spaces(failure):
    assert "spaces" in failure("run.yaml", "a:\n\tb: 1\n").remedy


def test_a_list_at_the_top_is_refused(failure):
    assert "[1, 2]" in failure("run.yaml", "- 1\n- 2\n").message


def test_a_missing_file_names_its_neighbours(tmp_path):
    for name in ("train.yaml", "eval.toml", "notes.txt"):
        write(tmp_path, name, "")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "trian.yaml")
    remedy = caught.value.problems[0].remedy
    assert "`train.yaml`" in remedy
    assert "eval.toml" in remedy
    assert "notes.txt" not in remedy


def test_a_missing_folder_is_named(tmp_path):
    with refused(ConfigError, tmp_path / "nowhere"):
        read(tmp_path / "nowhere" / "run.yaml")


def test_an_unknown_ending_names_the_known_ones(failure):
    assert ".toml" in failure("run.ini", "").remedy


def test_a_folder_is_no_run_description(tmp_path):
    folder = tmp_path / "run.yaml"
    folder.mkdir()
    with refused(ConfigError, key=str(folder)):
        read(folder)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"a: \xff\n")
    with refused(ConfigError, "byte 3", "UTF-8", key=str(path)):
        read(path)


@pytest.mark.parametrize("kind", ["int", "float", "bool", "timestamp"])
def test_a_value_that_is_not_what_its_tag_says_is_named_with_its_place(failure, kind):
    problem = failure("run.yaml", f"seed: !!{kind} x\n")
    assert problem.path.endswith("run.yaml:1:7")
    assert kind in problem.message


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "seed: {}"), ("a.json", '{{"seed": {}}}'), ("a.toml", "seed = {}")]
)
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 1500 + "]" * 1500, "[" * 110 + "]" * 110])
def test_what_python_itself_would_not_read_is_refused_in_words(failure, name, text, value):
    problem = failure(name, text.format(value))
    assert name in problem.path
    assert any(word in problem.message for word in ([str(MAX_DEPTH)] if "[" in value else ["int", "digits"]))


def test_a_name_that_begins_like_a_hexadecimal_number_is_text(tmp_path):
    assert read(write(tmp_path, "run.yaml", "seed: [0x_, 0x_f]")) == {"seed": ["0x_", 15]}
