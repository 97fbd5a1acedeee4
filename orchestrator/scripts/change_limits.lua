-- Sets limits while the farm runs, and wakes whoever is first in the lines: from there on each wakes the next.
-- What 429s taught about a limit is forgotten with it. Needs: limits.
-- KEYS: 1 limits, 2 waiters, 3 line of creators, 4 batches in line for permits
-- ARGV: 1 concurrency limit or '', 2 creation rate or '', 3 whether to forget all that was set and learned before
--       (1 or 0), 4 wake key prefix
-- Returns: 1
if ARGV[3] == '1' or ARGV[1] ~= '' then
  redis.call('HDEL', KEYS[1], 'concurrency', 'effective', 'effective_at', 'probe_ms', 'probed', 'ran', 'held', 'lagged')
end
if ARGV[3] == '1' or ARGV[2] ~= '' then
  redis.call('HDEL', KEYS[1], 'rate', 'refused_rate', 'refused_at', 'strict_at', 'eased_at', 'streak',
             'next_creation')
end
if ARGV[3] == '1' then redis.call('HDEL', KEYS[1], 'cooldown_until', 'cooldown_at') end
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'concurrency', ARGV[1]) end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'rate', ARGV[2]) end
for i = 2, 4 do wake_first(KEYS[i], ARGV[4]) end
return 1
