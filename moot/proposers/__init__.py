"""The drafter kinds, one file each, behind the interface in `base`. Kinds without a model import no torch."""
