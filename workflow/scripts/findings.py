"""Distributions of everything that a study measured, as one netCDF file and as CSV tables."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.findings import measure_findings
    from head_influence.summary import load_run
    from head_influence.tables import write_tables

    folder = a.output.parent
    joints = [[folder / "joint" / text / f"L{layer:02d}.nc" for layer in range(a.transitions)] for text in a.texts]
    attributes = {"study": a.study, "code": a.code}
    measure_findings(folder / "concentration.nc", folder / "identity.nc", joints, a.output, attributes)
    write_tables(load_run(folder.parent, folder.name), folder / "tables")


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--texts", nargs="+", required=True, help="ids of the texts, in order")
    p.add_argument("--transitions", type=int, required=True)
    p.add_argument("--code", required=True)
    p.add_argument("output", type=Path, help="findings.nc; concentration.nc, identity.nc and joint/ are beside it")
    run(main, p.parse_args())
