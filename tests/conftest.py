"""Fixtures for all tests."""

import contextlib
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def home_of_the_session(tmp_path_factory):
    """A data directory of the tests' own: nothing is written into the user's, or read from there.

    The demo model is reached by a link, since it is fetched and converted once a machine.
    """
    from costmodel.profile.store import user_directory

    models = user_directory() / "models"
    with contextlib.suppress(OSError):
        models.mkdir(parents=True, exist_ok=True)
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(models.absolute())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOFTREE_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def shared_dir():
    """The folder of facts, oracles and measured data beside the checkout."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the folder ../shared is not here")
    return folder
