"""An experiment at toy sizes, its rows stored, which validates every one of them."""

from hyperion.chapter import Context, Result, experiment_named
from hyperion.results import Run

SYNTHETIC = {"lines": {"train": 4000, "valid": 60, "test": 60}, "images": {"train": 600, "test": 200}}


def toy_context(name: str, sizes: dict, folder, upstream=()) -> Context:
    return Context(
        notebook="toy",
        experiment=name,
        sizes=sizes,
        data_source="synthetic",
        synthetic=SYNTHETIC,
        workspace=folder / "work" / name,
        upstream=list(upstream),
    )


def perform(context: Context, folder) -> Result:
    """Run an experiment here, store what it gives and read it back."""
    result = experiment_named(context.experiment).run(context, lambda done, total, note="": None)
    run = Run.create(folder / f"run-{context.experiment}", {})
    run.record("toy", context.experiment, result.rows, result.samples, input_hash="toy", source=result.source)
    assert run.rows("toy", context.experiment) == result.rows
    return result


def by_params(rows, metric: str, **wanted) -> dict:
    """Measured rows of a metric by variant, for those whose columns or parameters have the wanted values."""
    chosen = [row for row in rows if row.metric == metric and row.value is not None]
    return {
        row.variant: row
        for row in chosen
        if all((getattr(row, name) if name == "dtype" else row.params.get(name)) == value for name, value in wanted.items())
    }
