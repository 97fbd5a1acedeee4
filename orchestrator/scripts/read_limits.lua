-- Reads what the limiter knows, in one look; drops reservations that are over and waiters whose process is gone. Needs: limits.
-- KEYS: 1 limits, 2 permits, 3 waiters, 4 reservations, 5 line of creators, 6 places at the provider, 7 counters,
--       8 batches in line, 9 who stepped back, 10 when those in line for permits asked last
-- ARGV: 1 default concurrency limit, 2 default creation rate
-- Returns: a JSON object (limiter.py, `LimiterReading`)
local now = now_ms()
drop_silent(KEYS[10], now, KEYS[3], KEYS[8])
local limits = read_hash(KEYS[1])
local concurrency, configured = allowed_concurrency(limits, ARGV[1])
local _, reserved = read_reservations(KEYS[4], now)
local counters = redis.call('HMGET', KEYS[7], 'creations', 'rate_limited:rate', 'rate_limited:concurrency')
local batches = redis.call('ZRANGE', KEYS[8], 0, -1)
local wanted = 0
for _, batch in ipairs(batches) do wanted = wanted + string.match(batch, '^%d+') end
return cjson.encode({
  concurrency_configured = configured,
  concurrency_effective = concurrency,
  concurrency_set_live = limits.concurrency ~= nil,
  held = redis.call('ZCARD', KEYS[2]),
  sandboxes = redis.call('ZCARD', KEYS[6]),
  waiting = redis.call('ZCARD', KEYS[3]) + redis.call('ZCARD', KEYS[9]),
  batches_waiting = #batches,
  batch_places_waiting = wanted,
  reserved = reserved,
  rate_configured = tonumber(limits.rate or ARGV[2]),
  rate_effective = allowed_rate(limits, ARGV[2], now),
  rate_set_live = limits.rate ~= nil,
  refused_rate = tonumber(limits.refused_rate or '0'),
  cooldown_seconds = math.max(0, paused_until(limits, now) - now) / 1000,
  verifiers_waiting_to_create = redis.call('ZCOUNT', KEYS[5], '-inf', '(' .. string.format('%.0f', 2 * CLASS)),
  policies_waiting_to_create = redis.call('ZCOUNT', KEYS[5], string.format('%.0f', 2 * CLASS), '+inf'),
  creations = tonumber(counters[1] or '0'),
  rate_limited = tonumber(counters[2] or '0'),
  concurrency_limited = tonumber(counters[3] or '0'),
})
