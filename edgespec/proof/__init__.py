"""The losslessness test behind `edgespec verify`: does speculation change what a model says?

::

    chi2.py         chi-square probabilities, the power of a test
    fit.py          goodness of fit: cells, G-test, Holm's correction
    laws.py         samples of whole rounds, and the exact laws that they must follow
    replay.py       a scorer that remembers rows, so that a budget buys more samples
    identity.py     accept route + reject route = p, exactly, on the pair's own rows
    differences.py  texts with and without a drafter; rows alone and in company
    subject.py      a bundle's models, and prompts
    procedure.py    the whole test in a time budget
    report.py       what it found

Knows the loop from outside: what is fed and what comes out. Knows no terminal.
"""

from edgespec.proof.procedure import Proof, Setting
from edgespec.proof.report import Report
from edgespec.proof.subject import Subject, open_subject

__all__ = ["Proof", "Report", "Setting", "Subject", "open_subject"]
