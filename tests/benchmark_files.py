"""Small files in the form of each benchmark's dataset on the hub."""

import json
import random
import zipfile
from pathlib import Path

WORDS = "the of and a river stone house light walked green over under quiet morning he she was had found"


def text(seed: int, count: int) -> str:
    """Sentences of words, the same for the same seed."""
    rng = random.Random(seed)
    parts = (rng.choice(WORDS.split()) + rng.choice(("", "", "", ".")) for _ in range(count))
    return " ".join(parts) + "."


def write(folder: Path, place: str, rows: list[dict]) -> None:
    """JSON lines at a place below a folder."""
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_all(folder: Path) -> Path:
    """Two or three examples of every dataset that a part reads."""
    write_lm(folder)
    write(folder, "baber/paul_graham_essays/data/train-00000.jsonl", [{"text": text(1, 300)}] * 2)
    for i, config in enumerate(("gov_report", "qmsum", "narrative_qa", "qasper")):
        rows = [{"id": str(n), "pid": str(n), "input": text(n + i, 90)} for n in range(4)]
        write(folder, f"tau/scrolls/{config}/test.jsonl", rows)
    content = [{"repo_name": "a/b", "content": text(i, 90)} for i in range(4)]
    write(folder, "codeparrot/codeparrot-clean-valid/file-0054.json", content)
    # A JSON file may hold a list instead of lines.
    path = folder / "codeparrot/codeparrot-clean-valid/file-0054.json"
    path.write_text(json.dumps(content))
    pg19 = [{"short_book_title": "t", "text": text(3, 400)}]
    write(folder, "emozilla/pg19/data/test-00000-of-00001.jsonl", pg19)
    write_longbench(folder)
    write_retrieval(folder)
    return folder


def write_lm(folder: Path) -> None:
    """The datasets of lm-evaluation-harness's tasks."""
    page = f" = Heading = \n\n {text(5, 40)} 's word @-@ s , 's \n"
    write(
        folder,
        "EleutherAI/wikitext_document_level/wikitext-2-raw-v1/test.jsonl",
        [{"page": page}] * 2,
    )
    write(folder, "EleutherAI/lambada_openai/default/test.jsonl", [{"text": text(6, 30)}] * 3)
    piqa = [{"goal": "To open a door", "sol1": "push it", "sol2": "eat the door", "label": 0}]
    write(folder, "baber/piqa/data/validation-00000-of-00001.jsonl", piqa * 3)
    hellaswag = {
        "ind": 1,
        "activity_label": "Removing ice",
        "ctx_a": "A man scrapes a window.",
        "ctx_b": "then he",
        "ctx": "A man scrapes a window. then he",
        "endings": ["sits [title] down.", "drives off.", "sings.", "melts."],
        "source_id": "activity~x",
        "split": "val",
        "split_type": "indomain",
        "label": "1",
    }
    write(folder, "Rowan/hellaswag/data/validation-00000-of-00001.jsonl", [hellaswag] * 3)
    winogrande = {
        "sentence": "The cup broke on the stone because the _ was thin.",
        "option1": "cup",
        "option2": "stone",
        "answer": "1",
    }
    write(folder, "allenai/winogrande/winogrande_xl/validation-0.jsonl", [winogrande] * 3)
    arc = {
        "id": "x",
        "question": "What is ice?",
        "choices": {"text": ["Water.", "Sand.", "Air."], "label": ["A", "B", "C"]},
        "answerKey": "A",
    }
    for config in ("ARC-Easy", "ARC-Challenge"):
        write(folder, f"allenai/ai2_arc/{config}/test-00000-of-00001.jsonl", [arc] * 3)
    siqa = {
        "context": "Kai gave Robin a book.",
        "question": "How does Robin feel?",
        "answerA": "glad",
        "answerB": "cold",
        "answerC": "tall",
        "label": "1",
    }
    write(folder, "lighteval/siqa/validation.jsonl", [siqa] * 3)
    boolq = {"question": "is ice cold", "passage": text(7, 20), "idx": 0, "label": 1}
    write(folder, "aps/super_glue/boolq/validation-00000-of-00001.jsonl", [boolq] * 3)


_LONGBENCH = (
    "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec "
    "triviaqa samsum lcc repobench-p"
)
LONGBENCH = _LONGBENCH.split()


def write_longbench(folder: Path) -> None:
    """All tasks in one zip, as on the hub."""
    path = folder / "THUDM/LongBench/data.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for i, task in enumerate((*LONGBENCH, "dureader")):
            row = {
                "input": "What {walked}?",
                "context": text(i, 120),
                "answers": ["a river", "the stone house"],
                "length": 120,
                "dataset": task,
                "language": "en",
                "all_classes": ["river", "stone"] if task == "trec" else None,
                "_id": "1",
            }
            if task == "trec":
                row["answers"] = ["river"]
            archive.writestr(f"data/{task}.jsonl", f"{json.dumps(row)}\n" * 2)


def write_retrieval(folder: Path) -> None:
    """The datasets of the recall benchmark."""
    form = {"doc_id": "1", "file_name": "f", "key": "color", "value": "Green"}
    page = f"{text(8, 60)} Color: green. {text(9, 60)}"
    swde = form | {"text": f"{page} Summary of information above... Color:"}
    write(folder, "hazyresearch/based-swde-v2/validation.jsonl", [swde] * 2)
    write(folder, "hazyresearch/based-fda/validation.jsonl", [form | {"text": page}] * 2)
    squad = {"title": "t", "text": f"{text(10, 30)} The house was", "value": "green", "id": "1"}
    write(folder, "hazyresearch/based-squad/validation.jsonl", [squad] * 2)
    question = {
        "doc_id": "1",
        "context": f"[DOC] [TLE] {text(11, 60)} The house was green. {text(12, 60)}",
        "question": "The color of the house is",
        "answers": ["green", "Green"],
    }
    for name in ("based_triviaqa", "based_nq_2048", "based_drop"):
        write(folder, f"hazyresearch/{name}/data/validation-0.jsonl", [question] * 2)
