() => {
    // What the page asks once a second: its own address, and which panes it shows already.
    const digests = {};
    for (const pane of document.querySelectorAll("[data-pane]")) digests[pane.dataset.pane] = pane.dataset.digest;
    return [JSON.stringify({ search: location.search, digests })];
}
