"""Lists that a new gate, job field, duty or SQL folder must be entered in: each test names the file that lacks it."""

import re
from pathlib import Path

from assigner.admission.gates import GATES, Gate
from assigner.placement import registry
from ops import manual
from schema.requests import GROUPS, JobRequest
from tests.support.requests import REFUSED, TAKEN

HOUSE = Path(__file__).parent.parent.parent
CONSTRAINTS = "ops/docs/constraints.md"
#: Sections of the page that are about no gate of their own.
OTHER_SECTIONS = {"The other gates"}
OPERATIONS = "ops/docs/operations.md"
FLAT_FORM = "schema/sql/functions/normal_requests.sql"


def test_every_gate_is_asked() -> None:
    asked = {type(gate) for gate in GATES}
    missing = [found.__name__ for found in Gate.__subclasses__() if found not in asked]
    assert missing == [], f"assigner/admission/gates.py: GATES has no {', '.join(missing)}"
    assert len(asked) == len(GATES)


def test_every_gate_has_a_section_in_the_order_in_which_gates_are_asked() -> None:
    sections = re.findall(r"^## (.+)$", (HOUSE / CONSTRAINTS).read_text(), re.MULTILINE)
    missing = [gate.name for gate in GATES if gate.name not in sections]
    assert missing == [], f"{CONSTRAINTS} has no section for {', '.join(missing)}"
    described = [section for section in sections if section not in OTHER_SECTIONS]
    assert described == [gate.name for gate in GATES], f"{CONSTRAINTS}: one section for each gate, in their order"


def test_every_strategy_is_described() -> None:
    names = [*registry.BUILT_IN, registry.LOCALITY]
    for file, shown in (("ops/docs/priorities.md", "| `{}` |"), ("ops/leasehold.toml", '"{}":')):
        text = (HOUSE / file).read_text()
        missing = [name for name in names if shown.format(name) not in text]
        assert missing == [], f"{file} has no {', '.join(missing)}"


def test_every_field_of_a_job_has_an_option_and_a_flat_form_in_sql() -> None:
    wanted = list(JobRequest.model_fields)
    grouped = [field for group in GROUPS.values() for field in group]
    flat = re.findall(r"^\s+\(\d+, '(\w+)', '", (HOUSE / FLAT_FORM).read_text(), re.MULTILINE)
    lists = {
        "schema/requests.py: GROUPS": grouped,
        FLAT_FORM: flat,
        "tests/support/requests.py: TAKEN": TAKEN,
        "tests/support/requests.py: REFUSED": REFUSED,
    }
    missing = [f"{place} has no {field}" for place, names in lists.items() for field in wanted if field not in names]
    assert missing == [], "; ".join(missing)
    assert sorted(grouped) == sorted(wanted)
    assert [name for name in flat if name not in {"node", "after"}] == wanted, f"{FLAT_FORM}: in the model's order"


def test_every_duty_of_upkeep_is_described() -> None:
    source = "".join((HOUSE / f"assigner/maintenance/{name}.py").read_text() for name in ("upkeep", "retention"))
    names = re.findall(
        r'(?:yield|=) (?:Duty|self._by_need)\("([^"]+)"|^            "([a-z ]+)": partial\(', source, re.MULTILINE
    )
    document = " ".join((HOUSE / OPERATIONS).read_text().split())
    missing = [name for each in names for name in each if name and f"`{name}`" not in document]
    assert len(names) > 30
    assert missing == [], f"{OPERATIONS} has no {', '.join(missing)}"
    always = re.findall(r'Duty\("([^"]+)", 0,', source)
    hint = "a duty of each round is made by `_by_need`, with its entry of NEEDS in assigner/maintenance/needs.py"
    assert always == ["needs", "sessions", "dead ends of graphs"], hint


def test_every_sql_file_is_in_a_folder_that_is_loaded() -> None:
    loading = [*(HOUSE / "schema/migrations").rglob("*.py"), *(HOUSE / "schema/tables").glob("*.py")]
    loaded = {folder for file in loading for folder in re.findall(r'sql\.load_all\(\w+, "(\w+)"', file.read_text())}
    left = [file for file in (HOUSE / "schema/sql").rglob("*.sql") if file.parent.name not in loaded]
    assert left == [], "schema/migrations/versions/0036_baseline.py loads only " + ", ".join(sorted(loaded))


def test_every_metric_is_described() -> None:
    page = manual.OPERATIONS.read_text()
    assert manual.with_metrics(page) == page, f"{OPERATIONS}: the rows of metrics are old, run `make man`"
