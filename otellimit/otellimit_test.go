package otellimit_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/fallback"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/otellimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// observer returns one, and what reads its metrics.
func observer(t *testing.T, change ...func(*otellimit.Config)) (*otellimit.Observer, *metric.ManualReader) {
	t.Helper()
	reader := metric.NewManualReader()
	config := otellimit.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader))}
	for _, c := range change {
		c(&config)
	}
	o, err := otellimit.New(&config)
	must(t, err)
	return o, reader
}

// sum is all that a counter counts, or how often a histogram was told, of points with attributes.
func sum(t *testing.T, reader *metric.ManualReader, name string, with ...string) (total float64) {
	t.Helper()
	var all metricdata.ResourceMetrics
	must(t, reader.Collect(t.Context(), &all))
	add := func(set attribute.Set, n float64) {
		for i := 0; i < len(with); i += 2 {
			if v, ok := set.Value(attribute.Key(with[i])); !ok || v.AsString() != with[i+1] {
				return
			}
		}
		total += n
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != name {
				continue
			}
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, float64(p.Value))
				}
			case metricdata.Sum[float64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, p.Value)
				}
			case metricdata.Gauge[float64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, p.Value)
				}
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					add(p.Attributes, float64(p.Count))
				}
			}
		}
	}
	return total
}

// What metrics say is what callers were told and what is gone from the row: decisions, refusals,
// tokens and attempts, in every form, with transactions that PostgreSQL has run again, functions
// that fail, and callers that give up.
func TestMetricsAreTheTruth(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	o, reader := observer(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Observe: o.Observe, Escrow: 200 * time.Millisecond})
	must(t, err)
	must(t, errOf(o.Watch(store)))
	limit := ratelimit.FixedWindow{Name: "truth", Rate: 500, Period: 10000 * time.Hour}
	request := []ratelimit.Request{limit.For("k")}
	failed := errors.New("the function's")
	var mu sync.Mutex
	told, again := map[ratelimit.Outcome]float64{}, 0
	var wg sync.WaitGroup
	call := func(i int) {
		var result ratelimit.Result
		var err error
		runs := 0
		switch i % 8 {
		case 0:
			result, err = store.AllowFunc(t.Context(), request, func(pgx.Tx, ratelimit.Result) error {
				if runs++; runs == 1 {
					return &pgconn.PgError{Code: "40001"}
				}
				return nil
			})
		case 1:
			_, err = store.AllowFunc(t.Context(), request, func(pgx.Tx, ratelimit.Result) error { return failed })
		case 2:
			err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) (err error) {
				result, err = store.AllowTx(t.Context(), tx, request...)
				return err
			})
		case 3:
			over, cancel := context.WithCancel(t.Context())
			cancel()
			result, err = store.Allow(over, request...)
		default:
			result, err = store.Allow(t.Context(), request...)
		}
		mu.Lock()
		defer mu.Unlock()
		again += max(0, runs-1)
		switch {
		case errors.Is(err, failed):
			told[ratelimit.OutcomeRolledBack]++
		case errors.Is(err, ratelimit.ErrRefused) || err == nil && !result.OK:
			told[ratelimit.OutcomeRefused]++
		case err == nil:
			told[ratelimit.OutcomeGranted]++
		default:
			told[ratelimit.OutcomeFailed]++
		}
	}
	call(0) // while there are tokens, or no function might be run
	for i := 1; i < 800; i++ {
		wg.Go(func() { call(i) })
	}
	wg.Wait()
	store.Close()
	all := 0.0
	for outcome, want := range told {
		got := sum(t, reader, otellimit.MetricRequests, otellimit.AttrPolicy, "truth", otellimit.AttrResult, string(outcome))
		if all += got; got != want {
			t.Errorf("%s: the metrics say %g, and the callers were told %g", outcome, got, want)
		}
	}
	if total := sum(t, reader, otellimit.MetricRequests); total != 800 || all != 800 || told[ratelimit.OutcomeFailed] != 100 {
		t.Errorf("the metrics say %g calls, %v, want 800", total, told)
	}
	if got, want := sum(t, reader, otellimit.MetricErrors), told[ratelimit.OutcomeFailed]+told[ratelimit.OutcomeRolledBack]; got != want {
		t.Errorf("%g errors, want %g", got, want)
	}
	if got := sum(t, reader, otellimit.MetricRetries); got < float64(again) || again == 0 {
		t.Errorf("%g were run again by the metrics, and %d functions were", got, again)
	}
	var value float64
	must(t, db.Pool.QueryRow(t.Context(), "SELECT value FROM "+db.Schema+".rate_limits WHERE name = 'truth'").Scan(&value))
	taken := sum(t, reader, otellimit.MetricTokens)
	if taken != 500-value || taken != told[ratelimit.OutcomeGranted] {
		t.Errorf("the metrics say that %g tokens are gone, callers %g, the row %g", taken, told[ratelimit.OutcomeGranted], 500-value)
	}
	if held := sum(t, reader, otellimit.MetricHeld); held != 0 {
		t.Errorf("%g are held after Close", held)
	}
}

// What is given back is counted, too: taken less returned is what is gone.
func TestTokensReturned(t *testing.T) {
	o, reader := observer(t)
	store := memstore.NewWithConfig(memstore.Config{Observe: o.Observe})
	limit := ratelimit.FixedWindow{Name: "l", Rate: 100, Period: 10000 * time.Hour}
	for _, used := range []float64{0, 3, 12} {
		result, err := store.Allow(t.Context(), limit.ForN("k", 10))
		must(t, err)
		if used == 0 {
			store.Cancel(t.Context(), result.Receipt)
			store.Cancel(t.Context(), result.Receipt)
		} else if _, err := store.Settle(t.Context(), result.Receipt, used); err != nil {
			t.Fatal(err)
		}
	}
	must(t, errOf(store.Credit(t.Context(), limit.ForN("k", 2))))
	result, err := store.Check(t.Context(), limit.For("k"))
	must(t, err)
	gone := sum(t, reader, otellimit.MetricTokens) - sum(t, reader, otellimit.MetricTokensReturned)
	if math.Abs(gone-(100-result.Value)) > 1e-9 || gone != 13 {
		t.Errorf("%g are gone by the metrics, and %g in truth", gone, 100-result.Value)
	}
}

// What a limit in shadow would have refused or put off is a result of its own, and no wait; the
// tokens that it took are gone.
func TestShadow(t *testing.T) {
	o, reader := observer(t)
	store := memstore.NewWithConfig(memstore.Config{Observe: o.Observe})
	tried := ratelimit.TokenBucket{Name: "tried", Rate: 1, Period: time.Hour, MaxReserved: 1}
	for range 3 { // one is granted, one put off, and one refused
		if result, err := store.Reserve(t.Context(), tried.For("k").In(ratelimit.ModeShadow)); err != nil || !result.OK || result.RetryAfter > 0 {
			t.Fatalf("got %v, %v", result, err)
		}
	}
	for result, want := range map[ratelimit.Outcome]float64{ratelimit.OutcomeGranted: 1, ratelimit.OutcomeShadowed: 2, ratelimit.OutcomeRefused: 0} {
		if got := sum(t, reader, otellimit.MetricRequests, otellimit.AttrPolicy, "tried", otellimit.AttrResult, string(result)); got != want {
			t.Errorf("%g requests are %s, want %g", got, result, want)
		}
	}
	if tokens, waits := sum(t, reader, otellimit.MetricTokens), sum(t, reader, otellimit.MetricWait); tokens != 2 || waits != 0 {
		t.Errorf("%g tokens and %g waits, want 2 and none", tokens, waits)
	}
}

// Permits count by weight, of each limit that was asked.
func TestPermitsByWeight(t *testing.T) {
	o, reader := observer(t)
	store := memstore.NewWithConfig(memstore.Config{Observe: o.Observe}).Permits()
	gpus, tenant := ratelimit.InFlight{Name: "gpus", Limit: 4}, ratelimit.InFlight{Name: "tenant", Limit: 9}
	both := tenant.For("k").And(gpus.ForN("", 3))
	permit, err := store.Acquire(t.Context(), both)
	if err == nil {
		_, err = store.Acquire(t.Context(), both) // which is refused
	}
	if err == nil {
		err = store.Release(t.Context(), permit)
	}
	must(t, err)
	for _, name := range []string{otellimit.MetricPermits, otellimit.MetricPermitsReleased} {
		if got, one := sum(t, reader, name, otellimit.AttrPolicy, "gpus"), sum(t, reader, name, otellimit.AttrPolicy, "tenant"); got != 3 || one != 1 {
			t.Errorf("%s: %g of gpus and %g of tenant, want 3 and 1", name, got, one)
		}
	}
}

// A span is in the trace of its caller, also of decisions that shared a statement; and it has no
// key unless that is asked for.
func TestSpansAreTheirCallers(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, keys := range []bool{false, true} {
		spans := tracetest.NewSpanRecorder()
		provider := trace.NewTracerProvider(trace.WithSpanProcessor(spans))
		o, _ := observer(t, func(c *otellimit.Config) { c.TracerProvider, c.Keys = provider, keys })
		store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Observe: o.Observe})
		must(t, err)
		limit := ratelimit.TokenBucket{Name: "spans", Rate: 1000, Period: time.Second}
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				ctx, span := provider.Tracer("test").Start(t.Context(), fmt.Sprint("caller ", i))
				defer span.End()
				if err := store.Take(ctx, limit.For(fmt.Sprint("secret ", i))); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		parents := map[string]string{}
		for _, s := range spans.Ended() {
			parents[s.SpanContext().SpanID().String()] = s.Name()
		}
		heard := map[string]bool{}
		for _, s := range spans.Ended() {
			if !strings.HasPrefix(s.Name(), "ratelimit ") {
				continue
			}
			caller := parents[s.Parent().SpanID().String()]
			heard[caller] = true
			key := "secret " + strings.TrimPrefix(caller, "caller ")
			has := slices.ContainsFunc(s.Attributes(), func(a attribute.KeyValue) bool {
				return strings.Contains(a.Value.String(), key)
			})
			if has != keys || s.Name() != "ratelimit allow" || s.EndTime().Before(s.StartTime()) {
				t.Errorf("keys %v: the span %q of %q has %v", keys, s.Name(), caller, s.Attributes())
			}
		}
		if len(heard) != 64 {
			t.Errorf("%d callers have a span, want 64", len(heard))
		}
		store.Close()
	}
}

// No key is in any metric, whatever it is, and a name that is hostile is text.
func TestHostileKeysAndNames(t *testing.T) {
	o, reader := observer(t)
	store := memstore.NewWithConfig(memstore.Config{Observe: o.Observe})
	name := "\x1b[31m<script>\u202e"
	limit := ratelimit.TokenBucket{Name: name, Rate: 1, Period: time.Hour}
	keys := []string{"\x1b[31mred", "<script>alert(1)</script>", "\u202eevil", strings.Repeat("é", 1024)}
	for _, key := range keys {
		for range 2 {
			must(t, errOf(store.Allow(t.Context(), limit.For(key))))
		}
	}
	store.Allow(t.Context(), limit.For("\xff")) // is no key
	if got := sum(t, reader, otellimit.MetricRequests, otellimit.AttrPolicy, name, otellimit.AttrResult, "refused"); got != 4 {
		t.Errorf("%g were refused, want 4", got)
	}
	var all metricdata.ResourceMetrics
	must(t, reader.Collect(t.Context(), &all))
	printed := fmt.Sprintf("%+v", all)
	for _, key := range keys {
		if strings.Contains(printed, key) {
			t.Errorf("%q is in a metric", key)
		}
	}
}

// What middlewares tell is counted apart.
func TestDoors(t *testing.T) {
	o, reader := observer(t)
	limit := ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Hour}
	o.Observe(t.Context(), ratelimit.Event{Verb: ratelimit.VerbAllow, Door: "http", Outcome: ratelimit.OutcomeFailed, Passed: true, Requests: []ratelimit.Request{limit.For("k")}, Err: errors.New("down"), ErrorClass: "other"})
	if got := sum(t, reader, otellimit.MetricDoor, otellimit.AttrDoor, "http", otellimit.AttrPolicy, "api"); got != 1 {
		t.Errorf("got %g of the door, want 1", got)
	}
	if got := sum(t, reader, otellimit.MetricRequests); got != 0 {
		t.Errorf("%g requests of a store, want none", got)
	}
}

type age time.Duration

func (a age) Age() time.Duration { return time.Duration(a) }

func TestCatalogAge(t *testing.T) {
	o, reader := observer(t)
	must(t, errOf(o.WatchCatalog(age(90*time.Second))))
	if got := sum(t, reader, otellimit.MetricCatalogAge); got != 90 {
		t.Errorf("got %g seconds, want 90", got)
	}
}

// A silence is a metric of its own, and the calls that it fails are errors of the class silent.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, reader := observer(t)
		db := memstore.New(nil)
		store, err := fallback.New(db, &fallback.Config{Observe: o.Observe, Logger: slog.New(slog.DiscardHandler)})
		must(t, err)
		defer store.Close()
		must(t, errOf(o.WatchFallback(store)))
		silent := func(want float64) {
			t.Helper()
			if now, began := sum(t, reader, otellimit.MetricSilent), sum(t, reader, otellimit.MetricSilences); now != want || began != want {
				t.Errorf("silent %g after %g silences, want %g", now, began, want)
			}
		}
		silent(0)
		limit := ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Hour}
		db.SetSilent(true)
		for !store.Stats().Silent {
			_ = store.Take(t.Context(), limit.For("k"))
			time.Sleep(time.Second)
		}
		silent(1)
		before := sum(t, reader, otellimit.MetricErrors, otellimit.AttrError, "silent")
		for range 3 {
			_ = store.Take(t.Context(), limit.For("k"))
		}
		if got := sum(t, reader, otellimit.MetricErrors, otellimit.AttrError, "silent", otellimit.AttrPolicy, "api") - before; got != 3 {
			t.Errorf("%g errors of the class silent, want 3", got)
		}
		db.SetSilent(false)
		time.Sleep(2 * time.Second)
		if now, busy := sum(t, reader, otellimit.MetricSilent), sum(t, reader, otellimit.MetricBusy); now != 0 || busy != 0 {
			t.Errorf("after the silence it is %g, and %g calls found no connection", now, busy)
		}
	})
}

type versions pgstore.Versions

func (v versions) Versions(context.Context) (pgstore.Versions, error) {
	return pgstore.Versions(v), nil
}

// The lines of River's jobs are told by limit, all keys together.
func TestLines(t *testing.T) {
	db := pgtest.New(t, pgtest.With(migrations.River))
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	_, err = db.Pool.Exec(t.Context(), fmt.Sprintf(`INSERT INTO %s.rate_limit_parked (river, name, key, priority, job, weight, since)
SELECT '', 'exports', i::text, 1, i, 1, now() - interval '1 hour' FROM generate_series(1, 3) AS i`, db.Schema))
	must(t, err)
	o, reader := observer(t)
	must(t, errOf(o.WatchLines(store)))
	of := []string{otellimit.AttrPolicy, "exports"}
	if jobs, age := sum(t, reader, otellimit.MetricParked, of...), sum(t, reader, otellimit.MetricParkedAge, of...); jobs != 3 || age < 3600 || age > 3700 {
		t.Errorf("got %g jobs, %g seconds, want 3 and 3600", jobs, age)
	}
}

func TestTable(t *testing.T) {
	o, reader := observer(t)
	must(t, errOf(o.WatchTable(versions{Dead: 3, Since: 5})))
	if dead, age := sum(t, reader, otellimit.MetricDead), sum(t, reader, otellimit.MetricSnapshot); dead != 3 || age != 5 {
		t.Errorf("got %g versions and %g transactions, want 3 and 5", dead, age)
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
