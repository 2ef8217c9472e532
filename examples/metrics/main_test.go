package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// prometheusOr returns the path of a program of Prometheus, or leaves the test out where it is
// not installed.
func prometheusOr(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed (apt-get install prometheus)", name)
	}
	return path
}

// TestDashboard has Prometheus scrape the program under load, and runs every query of the
// dashboard and of the alerts there.
func TestDashboard(t *testing.T) {
	pgtest.Long(t)
	prometheus := prometheusOr(t, "prometheus")
	db := pgtest.New(t)
	handler, end, err := service(db.Pool, db.Schema)
	must(t, err)
	defer end()
	server := httptest.NewServer(handler)
	defer server.Close()
	ask := startPrometheus(t, prometheus, strings.TrimPrefix(server.URL, "http://"))

	load, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		for i := 0; load.Err() == nil; i++ {
			resp, err := http.Get(fmt.Sprintf("%s/?user=%d", server.URL, i%40%(1+i%20)))
			if err == nil {
				resp.Body.Close()
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	for name, query := range queries(t) {
		absent := strings.Contains(query, "catalog_age") || strings.Contains(query, "retries") || strings.Contains(query, "errors_total") || strings.Contains(query, `passed="true"`)
		wait(t, name+": "+query, func() bool {
			series, err := ask(query)
			return err == nil && (absent || series > 0) // the program has no catalog, and nothing fails
		})
	}
}

// queries are those of the dashboard, and what the alerts compare, as Grafana sends them.
func queries(t *testing.T) map[string]string {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	text, err := os.ReadFile("dashboard.json")
	must(t, err)
	must(t, json.Unmarshal(text, &dashboard))
	all := map[string]string{}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			all[p.Title] = strings.NewReplacer("$policy", ".*", "$__rate_interval", "5s").Replace(target.Expr)
		}
	}
	rules, err := os.ReadFile("alerts.yml")
	must(t, err)
	for line := range strings.Lines(string(rules)) {
		if expr, ok := strings.CutPrefix(strings.TrimSpace(line), "expr: "); ok {
			at := strings.LastIndexAny(expr, ">") // without the bound, there is something
			all["alert "+expr] = strings.NewReplacer("[5m]", "[5s]", "[15m]", "[5s]").Replace(expr[:at])
		}
	}
	if len(all) < 12+7 {
		t.Fatalf("got %d queries", len(all))
	}
	return all
}

// startPrometheus returns what says how many series a query has.
func startPrometheus(t *testing.T, path, target string) func(query string) (int, error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	address := listener.Addr().String()
	listener.Close()
	dir := t.TempDir()
	rules, err := filepath.Abs("alerts.yml")
	must(t, err)
	config := fmt.Sprintf("global: {scrape_interval: 500ms, scrape_timeout: 400ms}\nrule_files: [%q]\nscrape_configs: [{job_name: ratelimit, static_configs: [{targets: [%q]}]}]\n", rules, target)
	must(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600))
	cmd := exec.Command(path, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	must(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return func(query string) (int, error) {
		resp, err := http.Get("http://" + address + "/api/v1/query?query=" + url.QueryEscape(query))
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		var answer struct {
			Status, Error string
			Data          struct{ Result []any }
		}
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || answer.Status != "success" {
			return 0, fmt.Errorf("%w %s", err, answer.Error)
		}
		return len(answer.Data.Result), nil
	}
}

func wait(t *testing.T, what string, until func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !until(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("no answer: %s", what)
			return
		}
	}
}

// The alerts are raised, and not raised, as alerts_test.yml says.
func TestAlerts(t *testing.T) {
	promtool := prometheusOr(t, "promtool")
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}

// What tests of the dashboard need no Prometheus for: each metric that it asks is scraped.
func TestScrape(t *testing.T) {
	db := pgtest.New(t)
	handler, end, err := service(db.Pool, db.Schema)
	must(t, err)
	defer end()
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w
	}
	const key = "secret\x1b[31m"
	for range 7 {
		get("/?user=" + url.QueryEscape(key))
	}
	text := get("/metrics").Body.String()
	for _, want := range []string{
		`ratelimit_requests_total{otel_scope_name=`, `ratelimit_policy="per_user",ratelimit_result="granted"`, `ratelimit_result="refused"`,
		"ratelimit_request_duration_seconds_bucket", "ratelimit_request_time_in_queue_seconds_count", "ratelimit_wait_seconds_sum",
		"ratelimit_batch_size_sum", "ratelimit_tokens_total", "ratelimit_door_requests_total",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if strings.Contains(text, "secret") {
		t.Error("the key is in what is scraped")
	}
}

// With the tracer that users of pgx install on the pool, the decisions are the same, in every form,
// and so are the statements that they take.
func TestWithOtelpgx(t *testing.T) {
	answers := map[bool][]string{}
	for _, otel := range []bool{false, true} {
		var sent traced.Statements
		db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) {
			c.ConnConfig.Tracer = &sent
			if otel {
				c.ConnConfig.Tracer = multitracer.New(otelpgx.NewTracer(), &sent)
			}
		}))
		clock := func() time.Time { return time.Unix(1e9, 0) }
		for _, config := range []pgstore.Config{{}, {Portable: true}, {Escrow: time.Second}} {
			config.Schema, config.Clock = db.Schema, clock
			store, err := pgstore.New(db.Pool, &config)
			must(t, err)
			sent.Reset()
			add := func(answer any, err error) {
				answers[otel] = append(answers[otel], fmt.Sprint(answer, err))
			}
			for i := range 8 {
				result, err := store.Allow(t.Context(), PerUser.For("ann"))
				add(result, err)
				if i%3 == 0 {
					add(store.Cancel(t.Context(), result.Receipt))
				}
				add(store.Reserve(t.Context(), PerUser.For("bob"), PerUser.For("eve")))
				add(store.AllowFunc(t.Context(), []ratelimit.Request{PerUser.For("ron")}, func(tx pgx.Tx, _ ratelimit.Result) error {
					_, err := store.AllowTx(t.Context(), tx, PerUser.For("joe"), Everybody.For(""))
					return err
				}))
			}
			add(store.Pause(t.Context(), PerUser, "ann", time.Minute))
			add(store.Reset(t.Context(), PerUser, "ann"), nil)
			if config.Escrow == 0 { // which gives back at once, and beside
				add(fmt.Sprintf("%d sent, %d statements", sent.Sends(), sent.All()), nil)
			}
			for _, key := range []string{"ann", "bob", "eve", "ron", "joe"} {
				add(store.Reset(t.Context(), PerUser, key), nil)
			}
			store.Close()
		}
	}
	if got, want := fmt.Sprint(answers[true]), fmt.Sprint(answers[false]); got != want {
		t.Errorf("with otelpgx got\n%s\nwithout\n%s", got, want)
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
