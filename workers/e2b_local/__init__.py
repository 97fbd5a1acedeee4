"""An E2B-compatible sandbox service for one machine: a development backend that the unmodified E2B SDK talks to.

`service.serve` listens on the loopback. Each sandbox is one bubblewrap jail (`jail`) whose first process is an agent
(`agent/`) that answers the in-sandbox API over sockets inherited from the service (`channel`, `proxy`). The control
plane (`control`) creates, lists and kills them (`sandboxes`). No container engine, no root, no account.

What holds: a sandbox cannot see the host's files (but /usr and a few world-readable files of /etc, read-only), its
environment, its processes or its network; a full disk, a fork bomb or an endless output is that sandbox's trouble
alone; when a sandbox is reported gone, no process of it is left.

It is also a test bed: `faults` says what can be made to go wrong while it runs, `verdicts` decides it for each request,
`injection` carries it out. Unless asked to, it never lies.

What this sandbox does not stop:
- An exploit of the host's kernel. A jail shares the kernel; there is no virtual machine and no system call filter.
- Use of the machine's memory. The memory limit is an address-space limit of each *process* (RLIMIT_AS); a sandbox may
  hold `process_limit` of them, and files, shared memory segments and inodes besides. When the host runs out, the
  kernel kills sandbox processes first. Bounding a whole sandbox needs cgroups, hence root or a delegated subtree.
- Use of the processor. `vcpus` is what clients are told, nothing enforces it. A sandbox may also read the host's
  load, memory size and uptime in /proc.
- A command that breaks its own sandbox. Commands run as the agent's user: they cannot signal the agent (it is process
  1 of its namespace), but where the kernel allows ptrace they can attach to it, forge its answers or end it. That ends
  their sandbox, whose requests are then answered "not found", and no other.
- A reader of the service's memory or of the API key: whoever has the key can read and write every sandbox.
- Other users of this machine from guessing at the key: the loopback is open to all of them.

What differs from the cloud: sandboxes are always offline, also with `allow_internet_access=True`; there is one
template, the host's own /usr; "root" and `sudo` change HOME only, everything runs as uid 1000; files live in memory
(a home and a /tmp of bounded size); a paused sandbox refuses requests but is not frozen; file metadata needs Linux 6.6
(user attributes on tmpfs); no snapshots, forks, volumes, directory watches, network rules, or ports reachable from
outside.
"""
