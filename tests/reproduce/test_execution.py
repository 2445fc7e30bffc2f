from hyperion.reproduce.execution import LineFilter


def test_banners_warnings_and_fenced_blocks_pass_however_they_are_cut():
    fence = "=" * 50
    text = f"noise\nBANNER: one\nWARNING two\nUNEXPECTED: three\n{fence}\n  DATA  four\n{fence}\nnoise\nunfinished BANNER"
    for size in (1, 7, len(text)):
        lines = []
        stream = LineFilter(lines.append)
        for start in range(0, len(text), size):
            stream.write(text[start : start + size])
        assert lines == ["BANNER: one", "WARNING two", "UNEXPECTED: three", fence, "  DATA  four", fence]
