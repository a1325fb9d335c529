"""One process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from bonsai import locks
from bonsai.locks import abandoned, exclusive

HOLD = """
import sys, time
from pathlib import Path
from bonsai.locks import abandoned, exclusive
with exclusive(Path(sys.argv[1]), sys.exit):
    print("held", flush=True)
    time.sleep(60)
"""


class Busy(Exception):
    pass


def busy() -> None:
    raise Busy


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.lock"
    with exclusive(path, busy):
        with pytest.raises(Busy), exclusive(path, busy):
            pass
        with exclusive(path.with_name("b.lock"), busy):
            pass
        with pytest.raises(Busy), exclusive(path, busy):
            pass
    assert list(path.parent.iterdir()) == []
    with pytest.raises(KeyError), exclusive(path, busy):
        raise KeyError
    with exclusive(path, busy):
        pass


def test_who_waits_gets_it_next(tmp_path: Path) -> None:
    """Also where the file was opened before its holder deleted it."""
    path, inside, found = tmp_path / "a.lock", [], []

    def work() -> None:
        for _ in range(5):
            with exclusive(path, lambda: None):
                inside.append(1)
                found.append(len(inside))
                inside.pop()

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 20 and not path.exists()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(Busy), exclusive(path, busy):
            pass
        holder.kill()
    with exclusive(path, busy):
        pass
    assert not path.exists()


def test_only_a_lock_whose_holder_ended_is_abandoned(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.lock"
    with abandoned(path) as missing:
        assert not missing and not path.exists()
    with exclusive(path, busy), abandoned(path) as held:
        assert not held and path.exists()
    path.touch()
    with monkeypatch.context() as without_locks:
        without_locks.setattr(locks, "_lock", lambda _: None)
        with abandoned(path) as unknown:
            assert not unknown
    assert path.exists()
    with abandoned(path) as left:
        assert left
        with pytest.raises(Busy), exclusive(path, busy):
            pass
        with abandoned(path) as twice:
            assert not twice
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError), exclusive(tmp_path / "file" / "x" / "a.lock", busy):
        pass
