"""What the documents show of a terminal: every block under <!-- terminal: sonicmoe-hf ... --> is that command's output.

PYTHONPATH=.:tests python -m helpers.terminal writes them again.
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from transformers import DeepseekV3Config, Qwen3MoeConfig

from sonicmoe_hf.cli.main import main
from sonicmoe_hf.demo.model import QWEN3_30B_A3B

DOCUMENTS = Path(__file__).parents[2] / "docs"
COLUMNS = "110"
SESSION = re.compile(r"<!-- terminal: sonicmoe-hf ([^\n]*) -->\n```text\n(.*?)```\n", flags=re.DOTALL)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def make_folders(folder: Path) -> None:
    """The configs of hub models, in folders of their ids: no network is needed."""
    Qwen3MoeConfig(**QWEN3_30B_A3B).save_pretrained(folder / "Qwen" / "Qwen3-30B-A3B")
    deepseek = DeepseekV3Config(quantization_config=FP8)  # whose defaults are DeepSeek-V3's sizes
    deepseek.save_pretrained(folder / "deepseek-ai" / "DeepSeek-V3")


def output_of(options: str) -> str:
    """What the command prints, in a terminal of COLUMNS columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(shlex.split(options))
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def sessions() -> list[tuple[Path, str, str]]:
    """(document, options, output) of every block."""
    return [
        (path, options, output)
        for path in sorted(DOCUMENTS.glob("*.md"))
        for options, output in SESSION.findall(path.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make_folders(Path(temporary))
        os.chdir(temporary)
        for document in {document for document, *_ in sessions()}:
            written = SESSION.sub(
                lambda match: match[0].replace(f"text\n{match[2]}```", f"text\n{output_of(match[1])}```"),
                document.read_text(encoding="utf-8"),
            )
            document.write_text(written, encoding="utf-8")
        os.chdir(DOCUMENTS)
