"""RECOVER: it happened; put everything back, find what fits, and go on exactly.

======================  =========================================================================
:mod:`.classify`        is this error an OOM, of which memory, and may it be recovered from?
:mod:`.batches`         rows of a batch: count, cut, describe
:mod:`.snapshot`        what an attempt can change, taken before and put back after
:mod:`.step`            the guarded step; its records are in :mod:`.plan` and :mod:`.events`
:mod:`.ladder`          what to try next
:mod:`.rows`            how many rows to run together; fed by :mod:`.learning`, kept by
                        :mod:`.knowledge`
:mod:`.chunked`         children run row-chunk by row-chunk
:mod:`.separability`    may this step be split? With :mod:`.randomness` taken out, on few rows
                        (:mod:`.slices`), asked once (:mod:`.slice_questions`)
:mod:`.logs`            what micro-batches logged, merged; metrics in :mod:`.metric_merge`, running
                        statistics in :mod:`.batchnorm`, step outputs in :mod:`.outputs`
:mod:`.gradients`       what an interrupted backward left in ``.grad``
:mod:`.optimizer`       an update that ran out of memory is finished; the loss scaler's state in
                        :mod:`.scaler`
:mod:`.cleanup`         let go of what an exception holds
======================  =========================================================================

No engine knows a trainer: ``lightning_oom._lightning`` turns one into batches, steps and functions.
"""
