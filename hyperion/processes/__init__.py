"""Processes: the Job contract for work that needs a process of its own."""

from hyperion.processes.job import Job, JobError, report_progress, run_job

__all__ = ["Job", "JobError", "report_progress", "run_job"]
