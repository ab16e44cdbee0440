"""What the command prints for an exception: a sentence of the package, or the place of an error in a user's file."""

import linecache
import opcode
import traceback
from pathlib import Path
from types import TracebackType

from cute_attn.compiler.fingerprint import is_installed

_OWN = tuple(Path(__file__).resolve().parents[2] / name for name in ("cute_attn", "layouts"))
_SENTENCES = (ValueError, TypeError, KeyError, NotImplementedError, OSError, RuntimeError, ImportError)
_RAISES = {opcode.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in opcode.opmap}


def described(error: BaseException, *, verbose: bool) -> str | None:
    """The text to print for an exception; None for a defect of the package, whose whole traceback is to be shown.

    If a ``raise`` in the package's sources raised the exception, only its message is printed, with the line of the
    user's file that made the call, if any. Any other exception that passed through a user's file is printed with its
    traceback, without frames of installed packages unless ``verbose``. Of other system errors about a file, only the
    message is printed.
    """
    frames = _frames(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename and not is_installed(Path(error.filename)):
        return "".join(["error in a loaded file:\n", *traceback.format_exception_only(error)]).rstrip()
    users = [one for one in frames if not is_installed(_path(one))]
    if _is_own_sentence(error, frames):
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        return f"error: {text}" + "".join(f"\n  {_place(one)}" for one in users[-1:])
    if not users:
        if not isinstance(error, OSError) or not error.filename:
            return None
        return f"error: {str(error.filename)!r} cannot be used: {error.strerror or error}"
    shown = frames if verbose else users
    lines = (f"  {_place(one)}" for one in shown)
    hidden = len(frames) - len(shown)
    more = f"\n({hidden} frames of installed packages are hidden; -v shows them)" if hidden else ""
    kind = "".join(traceback.format_exception_only(error)).rstrip()
    return "\n".join(["error in a loaded file:", *lines, kind]) + more


def _frames(first: TracebackType | None) -> list[TracebackType]:
    """The frames of a traceback, without import machinery."""
    frames = []
    while first is not None:
        frames.append(first)
        first = first.tb_next
    return [one for one in frames if not one.tb_frame.f_code.co_filename.startswith("<")]


def _is_own_sentence(error: BaseException, frames: list[TracebackType]) -> bool:
    if not frames or not isinstance(error, _SENTENCES):
        return False
    last = frames[-1]
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] in _RAISES
    return raised and any(_path(last).is_relative_to(root) for root in _OWN)


def _path(frame: TracebackType) -> Path:
    return Path(frame.tb_frame.f_code.co_filename).resolve()


def _place(frame: TracebackType) -> str:
    name = frame.tb_frame.f_code.co_filename
    source = linecache.getline(name, frame.tb_lineno).strip()
    return f'File "{name}", line {frame.tb_lineno}, in {frame.tb_frame.f_code.co_name}: {source}'
