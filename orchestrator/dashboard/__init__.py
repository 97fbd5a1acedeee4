"""The farm's web page, read-only: what the orchestrator sees, for people.

    lookout.py       looks at Redis, once a second for all who watch      history.py    what ended lately
    markup.py        the one place where text becomes HTML                charts.py     drawings in SVG
    overview.py      the farm as HTML                                     episode.py    one episode as HTML
    page.py          the page in Gradio, the only importer of gradio      site.py       its address, token and JSON API

What always holds: nothing here changes the farm; one look serves every viewer; text that came from a sandbox, a task or
another host is shown cut and escaped; the browser is sent to no other host.
"""
