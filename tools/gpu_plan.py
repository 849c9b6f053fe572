"""Who may run beside whom on one GPU: the order in which `gpu-check` runs its rows, so that all of them end within nine minutes.

What measures, or tries how events race, runs alone. What only asks whether results are right runs beside others.
"""

import collections
import enum
import threading
import time


class Company(enum.Enum):
    """Beside whom a job may run."""

    # Whoever there is. Such a job stays away from MPS, in which a fault of one process is everybody's.
    ANY = enum.auto()
    # Processes that share the GPU through MPS: beside others of these.
    RANKS = enum.auto()
    # The same, but something of them ends badly: no other client of MPS beside it.
    DEATH = enum.auto()
    # Nobody beside it, and no MPS.
    ALONE = enum.auto()
    # Nobody beside it, under MPS.
    RANKS_ALONE = enum.auto()


Job = collections.namedtuple("Job", "number name company run")
# How many jobs of a kind run at once.
WORKERS = {Company.ANY: 3, Company.RANKS: 3}


class Clients:
    """The jobs that use MPS now, and the moment when there are none."""

    def __init__(self):
        self.changed, self.now, self.is_closing = threading.Condition(), set(), False

    def enter(self, job):
        with self.changed:
            self.changed.wait_for(lambda: not self.is_closing)
            self.now.add(job)

    def leave(self, job):
        """Gives those who are still there."""
        with self.changed:
            self.now.remove(job)
            self.changed.notify_all()
            return list(self.now)

    def when_gone(self, action):
        with self.changed:
            self.changed.wait_for(lambda: not self.is_closing)
            self.is_closing = True
            self.changed.wait_for(lambda: not self.now)
        try:
            action()
        finally:
            with self.changed:
                self.is_closing = False
                self.changed.notify_all()


def taken(jobs):
    """One after the other, for each of several threads."""
    while True:
        try:
            yield jobs.popleft()
        except IndexError:
            return


class Plan:
    """Jobs in the order of the table. One that returns True has spoilt its MPS and asks for a new one. `failed(name, error)` is told of one that raises."""

    def __init__(self, failed, one_by_one=False):
        self.jobs, self.failed, self.one_by_one = [], failed, one_by_one
        self.here, self.told = threading.local(), []
        self.hurt = {}  # number of a job: name of one that was stopped beside it, whose fault MPS gives to all

    def add(self, name, company, run):
        self.jobs.append(Job(len(self.jobs), name, company, run))

    def place(self):
        """(number of the job that runs in this thread, whether others may run beside it)"""
        job = getattr(self.here, "job", None)
        return (job.number, job.company in (*WORKERS, Company.DEATH) and not self.one_by_one) if job else (len(self.jobs), False)

    def carry_out(self, make_mps):
        """`make_mps()` gives MPS as a context with `restart`."""
        started = time.monotonic()
        for name, phase in (("beside others", self.together), ("alone", self.alone), ("alone under MPS", self.ranks_alone)):
            phase(make_mps)
            self.told.append(f"{name} until {time.monotonic() - started:.0f} s")

    def together(self, make_mps):
        anyone, ranks, deaths = (collections.deque(self.of(company)) for company in (Company.ANY, Company.RANKS, Company.DEATH))
        clients = Clients()
        loose = self.workers(Company.ANY, len(anyone), lambda: [self.do(job) for job in taken(anyone)])
        if self.one_by_one:
            join(loose)
        if ranks or deaths:
            with make_mps() as mps:
                join(self.workers(Company.RANKS, len(ranks), lambda: self.share(ranks, mps, clients)))
                self.in_turn(deaths, mps)
        join(loose)

    def share(self, jobs, mps, clients):
        for job in taken(jobs):
            clients.enter(job)
            is_spoilt = self.do(job)
            others = clients.leave(job)
            if is_spoilt:
                self.hurt |= {other.number: job.name for other in others}
                clients.when_gone(mps.restart)

    def alone(self, _):
        for job in self.of(Company.ALONE):
            self.do(job)

    def ranks_alone(self, make_mps):
        if jobs := self.of(Company.RANKS_ALONE):
            with make_mps() as mps:
                self.in_turn(jobs, mps)

    def in_turn(self, jobs, mps):
        for job in jobs:
            if self.do(job):
                mps.restart()

    def of(self, company):
        return [job for job in self.jobs if job.company is company]

    def workers(self, company, jobs, work):
        # Threads that do not keep the program from ending on Ctrl-C.
        started = [threading.Thread(target=work, daemon=True) for _ in range(min(1 if self.one_by_one else WORKERS[company], jobs))]
        for worker in started:
            worker.start()
        return started

    def do(self, job):
        self.here.job = job
        try:
            return job.run()
        except Exception as error:  # a row of its own, instead of the end of all others
            self.failed(job.name, error)
            return False


def join(workers):
    for worker in workers:
        worker.join()
