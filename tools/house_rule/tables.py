"""What the house rule excepts and demands by name: an exception has a reason, and goes when it is no longer needed."""

from __future__ import annotations

from dataclasses import dataclass

CROWDED = {"moot/commands": "one module per subcommand"}
"""Folders of lists: one module for each of many things of one sort."""

PUBLIC = {"moot.testing": "fakes for tests of what is built on Moot"}
"""Packages whose modules are imported by code outside the house."""

MEASUREMENTS = "lab/bench/"
"""A figure's conditions are its own, and stay as they are when a default of the product moves: no options of rule 6."""

PLUG_IN = "plug-in"
KEEPS_OUT = "keeps out "
PROPERTY_TEST = "property test "

SMALL_BUT_STANDING: dict[str, str] = {
    "lab.replay.attached_recorder": "keeps out torch",
    "moot.core.stepping.draft_wait": "property test tests/core/stepping/test_draft_wait.py",
    "moot.core.stepping.step_price": "property test tests/core/stepping/test_step_price.py",
}
"""Modules under 80 lines with one importer: PLUG_IN, KEEPS_OUT and the library, or PROPERTY_TEST and its path."""


@dataclass(frozen=True, slots=True)
class Contract:
    """Who must not import whom. Without `sources` everybody but `allowed` and the targets themselves is meant."""

    targets: tuple[str, ...]
    sources: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.targets, *self.sources, *self.allowed)


GENERATION, API, PEERS, STORE = ROUTER_ROOMS = (
    "services.router.generation",
    "services.router.api",
    "services.router.peers",
    "services.router.store",
)
"""They are built together: where the first is, all are."""
ROOMS = frozenset((*ROUTER_ROOMS, "moot.commands", "moot.model.backend", "moot.model.checks", "lab"))
"""Every name that a contract may use; one that is misspelled in a contract is not here."""

CONTRACTS = (
    Contract((API, PEERS, STORE), sources=(GENERATION,)),
    Contract((PEERS, STORE), sources=(API,)),
    Contract((API, STORE), sources=(PEERS,)),
    Contract((API, PEERS), sources=(STORE,)),
    Contract(("moot.model.checks",), allowed=("moot.model.backend",)),
    Contract(("lab",), allowed=("moot.commands",)),
)
