"""Checks of the claim "tune small, train big": coordinate check, transfer study, their verdicts and pictures."""
