# SPDX-License-Identifier: Apache-2.0
"""Base class of files with measurements, which one command writes and a run or another command reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

from nemo_specrollout.config.strict import ConfigError, build
from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.text_files import parse_json

_SHOWN = 300
"""Maximum number of characters of an error's reason that the user sees. A reason may quote the content of a wrong file."""


@dataclass(frozen=True)
class MeasuredFile:
    """Base class of the content of JSON files with measurements. The fields of a subclass are the keys of its file."""

    KIND: ClassVar[str]
    """Name of the command that writes the file. It is also what users call the file."""

    def to_json(self) -> str:
        """Returns the content as the text of a JSON file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path, field: str) -> Self:
        """Reads the file at `path`, which the user has named in `field` of a config.

        Raises ConfigError with the field, the path and a fix if the file cannot be read or has wrong content.
        """
        try:
            return build(cls, parse_json(read_regular(path)), "")
        except ConfigError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:
            reason = f"not JSON: {error}"
        except RecursionError:
            reason = "it is nested too deeply"
        raise ConfigError(
            f"{field}: {path} is not a {cls.KIND} ({reason[:_SHOWN]}); create one with `specrollout-lab {cls.KIND}`"
        )


def check_columns(path: str, **columns: Sequence[float]) -> None:
    """Raises ConfigError if the columns of a measured table differ in length or are empty.

    Also raises it if the numbers in the first column do not increase from each to the next. `path` is the field that has the
    columns.
    """
    first, values = next(iter(columns.items()))
    if not values or len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ConfigError(f"{path}: {sizes}; give as many of each, and at least one")
    if list(values) != sorted(set(values)):
        raise ConfigError(f"{path}.{first}: {list(values)}; write them from small to large, each once")
