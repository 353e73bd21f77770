from caffepy.solver.display import LossWindow


def smoothed(window: LossWindow, losses: list[float], start: int) -> list[float]:
    values = []
    for i, loss in enumerate(losses):
        window.add(start + i, loss)
        values.append(window.smoothed)
    return values


def test_mean_of_the_last_losses() -> None:
    assert smoothed(LossWindow(2, 10), [1.0, 3.0, 5.0, 11.0], 10) == [1.0, 2.0, 4.0, 8.0]


def test_goes_on_from_its_state() -> None:
    losses = [4.0, 1.0, 7.0, 2.0, 9.0, 3.0, 8.0]
    whole = smoothed(LossWindow(3, 5), losses, 5)
    for cut in range(len(losses)):
        first = LossWindow(3, 5)
        head = smoothed(first, losses[:cut], 5)
        assert head + smoothed(LossWindow.of(3, first.state()), losses[cut:], 5 + cut) == whole


def test_starts_anew_when_the_size_shrinks() -> None:
    window = LossWindow(3, 0)
    smoothed(window, [1.0, 2.0, 3.0], 0)
    assert LossWindow.of(2, window.state()).losses == []
