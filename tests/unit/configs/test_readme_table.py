"""README's table of config keys says what `configs/pd.yaml` says, key by key.

`python tests/unit/configs/test_readme_table.py` prints the table anew.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"^(?P<indent> *)(?P<key>[a-z_]+):(?P<rest>.*)$")


def table() -> str:
    """The table as Markdown, from the file's keys, values and comments."""
    parts: list[str] = []
    path: list[str] = []
    for line in (ROOT / "configs" / "pd.yaml").read_text().splitlines():
        found = LINE.match(line)
        if not found:
            continue
        path = [*path[: len(found["indent"]) // 2], found["key"]]
        value, _, meaning = found["rest"].strip().partition("# ")
        if len(path) == 1:
            parts.append(f"\n**`{path[0]}:`**\n\n| key | value | meaning, unit |\n|---|---|---|")
        elif value:
            name, shown = ".".join(path[1:]), meaning.replace("|", "&#124;")
            parts.append(f"| `{name}` | `{value.strip()}` | {shown} |")
    return "\n".join(parts).strip()


def test_the_table_in_the_readme_is_the_file() -> None:
    assert table() in (ROOT / "README.md").read_text()


if __name__ == "__main__":
    print(table())  # noqa: T201 - this is its purpose
