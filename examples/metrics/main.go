// Metrics has the decisions of limits in Prometheus, with a dashboard for Grafana and alerts:
//
//	DATABASE_URL=… go run ./examples/metrics
//	curl localhost:8080/metrics
//
// It serves GET /?user=ann, of which each user may have five a second, and /metrics. The store
// tells otellimit, which OpenTelemetry's exporter translates for Prometheus. dashboard.json
// is for Grafana's import; alerts.yml for rule_files of Prometheus. The test has Prometheus scrape
// this program and run every query of both.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/otellimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	PerUser   = ratelimit.TokenBucket{Name: "per_user", Rate: 5, Period: time.Second}
	Everybody = ratelimit.TokenBucket{Name: "everybody", Rate: 1000, Period: time.Second}
)

// service returns the handler of the program, and the function that ends it.
func service(pool *pgxpool.Pool, schema string) (http.Handler, func(), error) {
	registry := prometheus.NewRegistry()
	reader, err := exporter.New(exporter.WithRegisterer(registry))
	if err != nil {
		return nil, nil, err
	}
	observer, err := otellimit.New(&otellimit.Config{MeterProvider: metric.NewMeterProvider(metric.WithReader(reader))})
	if err != nil {
		return nil, nil, err
	}
	store, err := pgstore.New(pool, &pgstore.Config{Schema: schema, Observe: observer.Observe, Escrow: 200 * time.Millisecond})
	if err != nil {
		return nil, nil, err
	}
	if _, err := observer.Watch(store); err != nil {
		return nil, nil, err
	}
	if _, err := observer.WatchTable(store); err != nil {
		return nil, nil, err
	}
	limit, err := httplimit.New(store, &httplimit.Config{
		Policies: []httplimit.Policy{
			{Limit: PerUser, Key: func(r *http.Request) (string, error) { return r.FormValue("user"), nil }},
			{Limit: Everybody},
		},
		Observe: observer.Observe,
	})
	if err != nil {
		return nil, nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /", limit.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "hello") })))
	return mux, store.Close, nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "metrics:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := migrate.Up(ctx, pool, nil); err != nil {
		return err
	}
	handler, end, err := service(pool, "")
	if err != nil {
		return err
	}
	defer end()
	server := &http.Server{Addr: "localhost:8080", Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() { server.Close() })
	fmt.Println("on http://localhost:8080, until it is interrupted")
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
