"""A console before a gateway on a database of the module's own, and people with browsers."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.screens.console import Console, Person, browser, console, kept_files, left
from tests.support.servers import Databases


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a browser is left to the long tests."""
    for item in items:
        if isinstance(item, pytest.Function) and "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def shown(databases: Databases, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(databases, template, tmp_path_factory.mktemp("console") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def context(chromium: Any) -> Iterator[Any]:
    with kept_files(chromium) as opened:
        yield opened


@pytest.fixture
def person(context: Any, shown: Console) -> Iterator[Person]:
    made = Person(context, shown)
    yield made
    left(context)
    assert made.complaints == []
