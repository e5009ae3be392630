"""The windows of all replicas as objects, for comparisons with what each replica did."""

from megarl.rollout.table import SampleRows, SampleTable
from megarl.rollout.window import Window, Windows


def each_window(windows: Windows) -> list[Window]:
    """Return the window of each replica, in their order; of other replicas without tokens."""
    table = SampleTable(windows.finished)
    ends = windows.counts[:, 0].cumsum(0).tolist()
    found = []
    for place, (num_finished, _, num_steps, num_running) in enumerate(windows.counts.tolist()):
        samples = SampleRows(table, ends[place] - num_finished, ends[place])
        is_here = place == windows.here
        found.append(windows.mine if is_here else Window(samples, num_steps, num_running, windows.waiting[place]))
    return found
