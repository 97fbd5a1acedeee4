-- Opens an episode's row, once, before its job is enqueued. Of an earlier life under the same id, whose row and receipt
-- have come to their end, something may still be kept: it goes now, or what nobody may reuse yet (allocations, and the
-- provider's answers under their ids) is left behind by beginning above that life's last attempt.
-- KEYS: 1 episode row, 2 open, 3 the last attempt of an earlier life, 4 transcript, 5 and after: the parts of its mailbox
-- ARGV: 1 episode id, 2 its job's id up to the attempt, 3 spec JSON, 4 run id, 5 group id or '',
--       6 id of the trainer that drives it or '', 7 name of the queue that its job goes to, 8 template,
--       9 the longest that its policy sandbox can live, s, 10 the same of its verifier,
--       11 id of the reservation of its batch or '', 12 how long it may be queued while others of that batch run, ms
-- Returns: 1 opened, 0 it was there already
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local attempt = tonumber(redis.call('GET', KEYS[3]) or '0') + 1
for remains = 4, #KEYS do redis.call('DEL', KEYS[remains]) end
local now = now_ms()
redis.call('HSET', KEYS[1], 'state', 'queued', 'job', ARGV[2] .. attempt, 'attempt', attempt, 'spec', ARGV[3],
           'run', ARGV[4], 'group', ARGV[5], 'trainer', ARGV[6], 'queue', ARGV[7], 'queued_at', now, 'unsettled', 0,
           'allocations', '', 'template', ARGV[8], 'policy_seconds', ARGV[9], 'verifier_seconds', ARGV[10],
           'batch', ARGV[11], 'together_ms', ARGV[12])
redis.call('ZADD', KEYS[2], now, ARGV[1])
return 1
