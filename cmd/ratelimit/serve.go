package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/console"
	"github.com/pgratelimit/ratelimit/internal/inspect"
)

func serveCommand(o *options) *cobra.Command {
	var s server
	c := &cobra.Command{
		Use:   "serve",
		Short: "Serve a page that shows limits",
		Long: `Serve a page that shows limits, why a key is refused and until when, and what was changed,
until it is interrupted. It is for this machine only, unless --listen says otherwise: then
browsers have to give a token. To put the page into a program of your own, with its
authentication, see the package console.`,
		Example: `  ratelimit serve
  ratelimit serve --listen :8080 --token "$TOKEN"`,
		GroupID: seeing,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.onDesk(cmd, func(d *inspect.Inspector) error {
				s.config.Pool, s.config.Store, s.config.Catalog, s.config.Schema = d.Pool, d.Store, d.Catalog, d.Schema
				s.config.Logger = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
				return s.run(cmd)
			})
		},
	}
	c.Flags().StringVar(&s.address, "listen", "127.0.0.1:8428", "the address to listen at")
	c.Flags().StringVar(&s.config.Prefix, "prefix", "", "the path of the page, behind a proxy that does not strip it")
	c.Flags().StringVar(&s.config.Token, "token", "", "the password that browsers have to give; made up and printed if left out, unless only this machine is listened to")
	c.Flags().BoolVar(&s.config.Edit, "edit", false, "allow changes of keys and of the catalog")
	return o.onLimits(c)
}

// server is the page behind a server of its own.
type server struct {
	address string
	config  console.Config
}

// run serves until the program is interrupted.
func (s *server) run(cmd *cobra.Command) error {
	ctx, end := stoppable(cmd.Context())
	defer end()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.address)
	if err != nil {
		return badInput{fmt.Errorf("listen at %s: %w", s.address, err)}
	}
	defer listener.Close()
	at := listener.Addr().(*net.TCPAddr)
	if !at.IP.IsLoopback() && s.config.Token == "" {
		s.config.Token = rand.Text()
		fmt.Fprintln(cmd.ErrOrStderr(), "token:", s.config.Token)
	}
	page, err := console.New(&s.config)
	if err != nil {
		return err
	}
	go s.config.Catalog.Run(ctx) // which completes raises
	serving := &http.Server{Handler: page, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(s.config.Logger.Handler(), slog.LevelWarn)}
	fmt.Fprintf(cmd.OutOrStdout(), "http://%s%s/\n", at, s.config.Prefix)
	stop := context.AfterFunc(ctx, func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = serving.Shutdown(ending) // the process ends in any case
	})
	defer stop()
	if err := serving.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
