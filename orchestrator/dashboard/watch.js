// Says so when the page has not been renewed for a while: the header changes with every look.
(() => {
    const PATIENCE_MS = 6000;
    let digest = null, since = Date.now();
    setInterval(() => {
        const header = document.querySelector('[data-pane="header"]');
        const now = header ? header.dataset.digest : null;
        if (now !== digest || document.hidden) { digest = now; since = Date.now(); }
        document.body.classList.toggle("farm-lost", Date.now() - since > PATIENCE_MS);
    }, 1000);
})();
