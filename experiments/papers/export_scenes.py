"""Write the generated pictures as PNG files with a table of captions, which data.source=captions reads.

Command:  python -m experiments.papers.export_scenes --output=DIR [--scenes=1000] [--smoke]
"""

from pathlib import Path

from absl import app, flags

from experiments.measure import smoke_sizes
from experiments.sources.scenes import build, draw

OUTPUT = flags.DEFINE_string("output", None, "The folder to write into.", required=True)
SCENES = flags.DEFINE_integer("scenes", 1_000, "The most pictures of a split.", lower_bound=1)


def main(_: list[str]) -> None:
    """Write SPLIT.tsv (path, TAB, caption) and SPLIT/NUMBER.png for train, valid and test."""
    smoke_sizes(scenes=10)
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit('Writing PNG files needs Pillow: pip install -e ".[vision]"') from None
    for split, pairs in build(SCENES.value).items():
        folder, lines = Path(OUTPUT.value) / split, []
        folder.mkdir(parents=True, exist_ok=True)
        for number, pair in enumerate(pairs[: SCENES.value]):
            Image.fromarray(draw(pair.source)).save(folder / f"{number}.png")
            lines.append(f"{split}/{number}.png\t{pair.target}\n")
        folder.with_suffix(".tsv").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(lines):,} pictures")


if __name__ == "__main__":
    app.run(main)
