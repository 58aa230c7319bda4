"""The drafter kinds behind one interface; kinds without a model import no torch."""
