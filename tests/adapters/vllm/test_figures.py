"""A scheduler's figures, through a file, as the server's metrics have them."""

from pathlib import Path

from kvstrata.adapters.vllm.figures import HELP, Figures, Writer, figures_path, read


def test_figures_come_through_and_go_with_their_scheduler(tmp_path: Path) -> None:
    now = [0.0]
    writer = Writer(tmp_path / "a.json", clock=lambda: now[0])
    made: list[Figures] = []

    def make() -> Figures:
        made.append(Figures(frames=5, held_frames=len(made), tokens={"INT2": 64}))
        return made[-1]

    writer.write(make)
    writer.write(make)
    assert len(made) == 1 and read(tmp_path / "a.json") == made[0]
    writer.write(make, last=True)
    assert read(tmp_path / "a.json") == made[-1] != made[0], "before a scheduler has nothing to do for long"
    now[0] = 1.0
    writer.write(make)
    assert read(tmp_path / "a.json") == made[2] != made[1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    writer.remove()
    writer.remove()
    assert read(tmp_path / "a.json") is None


def test_a_broken_file_is_no_figure(tmp_path: Path) -> None:
    for text in ("", "{", "[1]", '{"nothing": 1}'):
        (tmp_path / "a.json").write_text(text)
        assert read(tmp_path / "a.json") is None


def test_each_figure_is_explained_and_each_rank_has_a_file() -> None:
    assert set(HELP) == set(Figures.__slots__)
    assert figures_path("x", 0) != figures_path("x", 1) != figures_path("y", 1)
