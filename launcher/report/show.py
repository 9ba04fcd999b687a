"""The verdict of a report as it is printed."""

from rich.console import Console

from launcher.report.words import headline
from launcher.report.write import Report


def print_verdict(made: Report, page: str, console: Console) -> None:
    """Prints the verdict on each family, what couldn't be read, and the name of the page with the rest."""
    for verdict in made.verdicts:
        name = f"{' '.join(verdict.family.training)}: " if verdict.family.training else ""
        console.print(name + headline(verdict), markup=False, highlight=False, soft_wrap=True)
    for note in made.source.notes:
        console.print(f"note    {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report  {page}", markup=False, highlight=False, soft_wrap=True)
