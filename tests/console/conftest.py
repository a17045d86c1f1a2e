"""A console before a gateway on a database of the module's own, and people with browsers."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.screens.console import Console, Person, browser, console
from tests.support.servers import Databases


@pytest.fixture(scope="module")
def shown(databases: Databases, template: str) -> Iterator[Console]:
    with console(databases, template) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def person(chromium: Any, shown: Console) -> Iterator[Person]:
    made = Person(chromium, shown)
    yield made
    made.context.close()
    assert made.complaints == []
