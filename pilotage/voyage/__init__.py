"""The voyage: the stages of the onboarding guide in order, in a run directory that can be resumed."""
