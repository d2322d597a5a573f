"""Problems: the same ones whenever asked, and broken files named line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError

from consistent_kernels.errors import ConfigurationError, InvalidInputError
from vllm_consistent.cli.demo.data import Arithmetic, JsonlProblems, load_jsonl, render


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_arithmetic_is_a_function_of_seed_and_step() -> None:
    drawn = Arithmetic(7).problems(3, 5)
    assert drawn == Arithmetic(7).problems(3, 5)
    assert drawn != Arithmetic(7).problems(4, 5)
    assert drawn != Arithmetic(8).problems(3, 5)


def test_arithmetic_answers_are_right_and_questions_differ() -> None:
    drawn = Arithmetic(0).problems(0, 20)
    questions = [problem.messages[-1]["content"] for problem in drawn]
    assert len(set(questions)) == 20
    for question, problem in zip(questions, drawn, strict=True):
        left, right = question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(left) + int(right) == int(problem.answer)


def test_arithmetic_repeats_only_when_it_must() -> None:
    assert len(Arithmetic(0).problems(0, 200)) == 200


def test_jsonl_takes_text_chats_and_both_kinds_of_answer(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write_lines(
        tmp_path / "problems.jsonl",
        json.dumps({"prompt": "2 + 2?", "answer": 4}),
        "",
        json.dumps({"prompt": chat, "answer": " yes "}),
    )
    first, second = load_jsonl(path)
    assert first.messages == ({"role": "user", "content": "2 + 2?"},)
    assert first.answer == "4"
    assert second.messages == tuple(chat)
    assert second.answer == "yes"


def test_jsonl_problems_go_round(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": str(i), "answer": i}) for i in range(3)]
    source = JsonlProblems(write_lines(tmp_path / "p.jsonl", *lines))
    assert [p.answer for p in source.problems(0, 2)] == ["0", "1"]
    assert [p.answer for p in source.problems(1, 2)] == ["2", "0"]
    assert "3 problems" in source.describe()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": "x"}', "key 'answer' is missing"),
        ('{"answer": 1}', "key 'prompt' is missing"),
        ('{"prompt": "x", "answer": true}', "answer must be"),
        ('{"prompt": "x", "answer": 1.5}', "answer must be"),
        ('{"prompt": "x", "answer": null}', "answer must be"),
        ('{"prompt": "x", "answer": " "}', "answer must be"),
        ('{"prompt": "  ", "answer": 1}', "prompt is empty"),
        ('{"prompt": [], "answer": 1}', "non-empty list"),
        ('{"prompt": [{"role": "tool", "content": "x"}], "answer": 1}', "non-empty list"),
        ('{"prompt": 3, "answer": 1}', "prompt must be a text"),
        ('{"prompt": "\\ud800", "answer": 1}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_jsonl_rejects_a_broken_line_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", '{"prompt": "x", "answer": 1}', line)
    with pytest.raises(ConfigurationError, match=rf"line 2: .*{message}"):
        load_jsonl(path)


def test_jsonl_lists_all_broken_lines_up_to_ten(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *["{"] * 14)
    with pytest.raises(ConfigurationError) as caught:
        load_jsonl(path)
    assert "line 10:" in str(caught.value)
    assert "line 11:" not in str(caught.value)
    assert "and 4 more broken lines" in str(caught.value)


def test_jsonl_rejects_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n")
    with pytest.raises(InvalidInputError, match="at least one problem"):
        load_jsonl(path)


def test_jsonl_rejects_other_encodings_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "x", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(ConfigurationError, match="line 2: not UTF-8"):
        load_jsonl(path)


def test_jsonl_accepts_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x", "answer": 1}\n')
    assert len(load_jsonl(path)) == 1


class PlainTokenizer:
    """Has no chat template, as base models."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


class StrictTokenizer:
    """Its template wants another role first, as some models' do."""

    chat_template = "{{ raise_exception('no system role') }}"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        raise TemplateError("no system role")


def test_render_says_what_a_template_does_not_take() -> None:
    messages = [{"role": "system", "content": "a"}]
    with pytest.raises(InvalidInputError, match=r"roles \['system'\]: no system role"):
        render(StrictTokenizer(), messages)


def test_render_rejects_a_prompt_without_tokens() -> None:
    with pytest.raises(InvalidInputError, match="prompt must be at least one token"):
        render(PlainTokenizer(), [])


def test_render_without_a_chat_template_joins_lines() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert bytes(render(PlainTokenizer(), messages)) == b"a\nb\n"
